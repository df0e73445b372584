"""The table of tasks by name. A new benchmark is one file beside this one and one line here."""

from __future__ import annotations

from mmkit.evaluation.task import Task
from mmkit.evaluation.tasks.charts import CHARTS
from mmkit.evaluation.tasks.easy_vqa import EASY_VQA, EASY_VQA_FULL
from mmkit.evaluation.tasks.published_sets import PUBLISHED_SETS
from mmkit.evaluation.tasks.stamps import GROUND, REFER

TASKS: dict[str, Task] = {task.name: task for task in (EASY_VQA, EASY_VQA_FULL, REFER, GROUND, CHARTS)} | PUBLISHED_SETS
