"""One file a benchmark family; `evaluation.task.TASKS` lists them."""
