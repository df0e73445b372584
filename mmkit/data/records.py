"""Records of files (dictionaries) to examples, by what the record holds: one reader of all forms, whichever
file they stand in.

Forms, each with an example in docs/data-formats.md: LLaVA, ShareGPT and OpenAI messages, Qwen-VL, ms-swift,
LLaMA-Factory, instruction triples, question and answer, multiple choice, captions, GRIT. Every key of a
record is read, known to be metadata (`record.METADATA`), or noted in `Example.notes`; what a record holds
that no model here reads is a BadRecord.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from mmkit.data.choices import choice_question
from mmkit.data.example import IMAGE, Example, Role, Turn
from mmkit.data.picture_fields import Shown, image_of, images_of, in_order
from mmkit.data.record import Record, holds_nothing, parsed, shown
from mmkit.data.record_regions import with_regions
from mmkit.data.templates import image_first

# OpenAI's developer is what system was before; model is Gemma's assistant
ROLES: dict[str, Role] = {
    "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "bot": "assistant",
    "model": "assistant",    "system": "system", "developer": "system",
}  # fmt: skip
MESSAGES = ("conversations", "messages", "conversation", "texts")
ASKED, ANSWERED = (
    ("question", "query", "prompt", "instruction"),
    ("answer", "response", "output", "outputs", "completion"),
)
SEVERAL_ANSWERS = (
    "answers",
    "direct_answers",
    "label",
)  # VQAv2 and TextVQA, A-OKVQA, ChartQA (label beside query)
MOST_FREQUENT = "multiple_choice_answer"  # VQAv2's name of the answer that most people gave
CAPTION_FIELDS = ("caption", "text", "title", "txt", "captions")
UNREADABLE = {  # field -> what it holds
    **dict.fromkeys(("video", "videos", "video_path", "video_file"), "video"),
    **dict.fromkeys(("audio", "audios", "audio_path", "speech", "sound"), "audio"),
    **dict.fromkeys(("tools", "functions", "tool_calls", "function_call"), "tools"),
}
# Placeholders that no reader has replaced: the model would learn their letters. A tag with its closing tag is
# a text about tags.
_PLACEHOLDER = re.compile(
    r"<(video|audio|speech|img|bbox|bbox_location\d+|ref-object|quad|loc_?\d+|image[ _]?\d+|image_placeholder"
    r"|ImageHere|IMG_CONTEXT)>|\[IMG\]|<\|(?:image|video|audio|image_pad|video_pad|vision_start|vision_end"
    r"|image_\d+|box_start|box_end|object_ref_start)\|>"
)
_TAGS = ("video", "audio", "img")  # of HTML, which answers may write
_PICTURE_IN_TEXT = re.compile(r"<img>([^<>\n]+)</img>|<image[ _]?(\d{1,2})>|<\|image_(\d{1,2})\|>|<image>")
_FLAGS = ("loss", "weight", "train")  # of a message: ms-swift, OpenAI, axolotl


def example_of(
    fields: Mapping[str, Any],
    key: str,
    source: str,
    folder: str | None,
    rng: np.random.Generator | None = None,
) -> Example:
    """The example of a record; BadRecord where it has no text, or holds what cannot be read. With ``rng`` a
    user's boxes of GRIT are shown as points in half of the messages, as in training.
    """
    record = Record(fields, key, source, folder)
    for name in fields:
        if name in UNREADABLE and not holds_nothing(fields[name]):
            raise record.bad(f"has {name}, which no model here reads", UNREADABLE[name])
    pictures: Shown = []
    system, history = record.take("system", "system_prompt"), record.take("history")
    turns: list[Turn] = []
    if system is not None:
        turns.append(Turn("system", _marked(record, record.text(system, "system text"), pictures)))
    if history is not None:
        turns += _history(record, history, pictures)
    first = len(turns)
    messages = _messages(record)
    if messages is None:
        turns += _question(record, pictures)
    else:
        turns += [turn for one in messages for turn in _turns(record, one, pictures)]
    if system is not None and (other := [turn.text for turn in turns[1:] if turn.role == "system"]):
        if other != [turns[0].text]:
            raise record.bad("has a system text of its own and another among its messages; keep one", "turns")
        turns, first = turns[1:], first - 1
    listed = images_of(record)
    images = in_order(record, listed, pictures)
    before = messages is None or "texts" in record.read  # where The Cauldron's pictures stand too
    if images and not pictures and before and turns:
        asked = next((number for number, turn in enumerate(turns) if turn.role == "user"), 0)
        turns[asked] = replace(turns[asked], text=f"{IMAGE * len(images)}\n{turns[asked].text}".strip())
    elif len(images) == 1 and len(pictures) == 1:
        for number, turn in enumerate(turns):
            if IMAGE in turn.text and turn.role == "user":
                text = turn.text.replace(f"Picture 1: {IMAGE}", IMAGE)  # Qwen-VL's label
                turns[number] = replace(turn, text=image_first(text))
    turns, regions = with_regions(record, turns, images, first, rng)
    for turn in turns:
        for left in _PLACEHOLDER.finditer(turn.text) if "<" in turn.text or "[" in turn.text else ():
            about_tags = f"</{left[1]}>" in turn.text or (turn.role == "assistant" and left[1] in _TAGS)
            if not about_tags:
                raise record.bad(
                    f"has the placeholder {left[0]} of another tool in its text and nothing it stands for",
                    "placeholder",
                )
    record.note_unread(fields, record.read)
    meta = {
        name: value
        for name, value in fields.items()
        if name not in record.read and isinstance(value, str | int | float | bool)
    }
    return Example(key, images, tuple(turns), tuple(regions), source, meta, tuple(record.notes))


def key_of(fields: Mapping[str, Any], number: int) -> str:
    """The record's id, or its place in the file counted from 1."""
    name = next(
        (fields[field] for field in ("id", "question_id", "key") if fields.get(field) not in (None, "")), None
    )
    return f"record {number + 1}" if name is None else str(name)


def is_record(fields: Mapping[str, Any]) -> bool:
    """Whether it has a text in one of the forms above."""
    return any(
        not holds_nothing(fields.get(name))
        for name in (*MESSAGES, *ASKED, *ANSWERED, *SEVERAL_ANSWERS, *CAPTION_FIELDS)
    )


# ---------------------------------------------------------------- conversations


def _messages(record: Record) -> list[Any] | None:
    """The messages of a conversation; None where the record has none."""
    there = [name for name in MESSAGES if record.fields.get(name) is not None]
    if not there:
        asked, answered = (record.fields.get(name) for name in ("prompt", "completion"))
        if not all(
            isinstance(one, list) and one and isinstance(one[0], Mapping) for one in (asked, answered)
        ):
            return None
        record.read |= {"prompt", "completion"}  # TRL's conversational form
        return [*asked, *answered]
    name = next((name for name in there if not holds_nothing(record.fields[name])), there[0])
    record.read.add(name)
    messages = record.fields[name]
    messages = parsed(messages) if isinstance(messages, str) else messages
    if not isinstance(messages, list | tuple | np.ndarray):
        raise record.bad(f"its conversation is a {type(messages).__name__}, not a list of messages", "turns")
    return list(messages)


def _turns(record: Record, message: Any, pictures: Shown) -> list[Turn]:
    """The turn of a message, or the two of an object that holds question and answer (ms-swift, The
    Cauldron).
    """
    message = parsed(message) if isinstance(message, str) else message
    if not isinstance(message, Mapping):
        raise record.bad(f"a message is {shown(message)}, not an object with from and value", "turns")
    pair = (
        {ROLES[name]: name for name in message if name in ROLES}
        if "from" not in message and "role" not in message
        else {}
    )
    if {"user", "assistant"} <= pair.keys():
        record.note_unread(message, pair.values(), "conversations[].")
        texts = {role: record.text(message[pair[role]], "message") for role in ("user", "assistant")}
        _not_empty(record, texts["assistant"])
        return [Turn(role, _marked(record, text, pictures)) for role, text in texts.items()]
    role_key = "from" if message.get("from") is not None else "role"
    role, content_key = message.get(role_key), "value" if message.get("value") is not None else "content"
    if not isinstance(role, str) or role.strip().lower() not in ROLES:
        raise record.bad(f"a message is from {shown(role)}; it must be one of {', '.join(ROLES)}", "turns")
    role, content = ROLES[role.strip().lower()], message.get(content_key)
    trained = True
    for name, flag in message.items():
        if (name in UNREADABLE or name in ("image", "images")) and not holds_nothing(flag):
            raise record.bad(f"a message has {name} of its own, which is not read", "turns")
        if name not in _FLAGS or flag is None:
            continue
        if not isinstance(flag, bool | int | float) or flag not in (0, 1):
            raise record.bad(
                f"a message has {name} {shown(flag)}; it is true or 1 where it is learned, else false or 0",
                "turns",
            )
        trained = trained and bool(flag)
        if flag and role == "user":
            record.note("records have a user's message that is marked to be learned, which only answers are")
    record.note_unread(message, (role_key, content_key, *_FLAGS), "conversations[].")
    if content is None:
        found = ", ".join(
            f"{str(name)[:40]}{' (null)' if value is None else ''}" for name, value in message.items()
        )
        what, reason = ("answer", "empty answer") if role == "assistant" else ("message", "turns")
        raise record.bad(
            f"has an empty {what}: the message has {found[:200]}; its text stands in value or content", reason
        )
    if isinstance(content, list):
        text = "".join(_part(record, part, pictures) for part in content)
    else:
        text = _marked(record, record.text(content, "message"), pictures)
    if role == "assistant" and trained:
        _not_empty(record, text)
    return [Turn(role, text, trained)]


def _part(record: Record, part: Any, pictures: Shown) -> str:
    """The text of a typed part of a message, a marker for a picture: OpenAI's parts, Anthropic's, Qwen's
    and Hugging Face's.
    """
    if not isinstance(part, Mapping):
        raise record.bad(f"a part of a message is {shown(part)}, not an object with type and text", "turns")
    kind = part.get("type") or next(
        (name for name in ("text", "image", "image_url") if not holds_nothing(part.get(name))), None
    )
    if kind in ("text", "input_text", "output_text"):
        record.note_unread(part, ("type", "text", "index", "annotations", "cache_control"), "parts[].")
        return _marked(record, record.text(part.get("text"), "message part"), pictures)
    if kind in ("image", "image_url", "input_image"):
        places = ("image_url", "image", "url", "path", "source", "base64")
        place = next((name for name in places if not holds_nothing(part.get(name))), None)
        record.note_unread(
            part, ("type", place, "index", "detail", "cache_control", "min_pixels", "max_pixels"), "parts[]."
        )
        number = part.get("index")
        bare = number if isinstance(number, int) and not isinstance(number, bool) else None
        pictures.append(bare if place is None else image_of(record, part[place]))
        return IMAGE
    raise record.bad(f"a message has a part of type {shown(kind)}, which no model here reads", "message part")


def _marked(record: Record, text: str, pictures: Shown) -> str:
    """A text with ``<image>`` for each picture it shows by path (Qwen-VL's ``<img>``) or number (MMMU's
    ``<image 1>``); ``pictures`` takes them in.
    """
    has_numbers = any(not holds_nothing(record.fields.get(name)) for name in ("image", "images", "image_1"))

    def put(match: re.Match) -> str:
        number = match[2] or match[3]
        if number and not has_numbers:
            return match[0]
        pictures.append(
            image_of(record, match[1].strip()) if match[1] else int(number) - 1 if number else None
        )
        return IMAGE

    return _PICTURE_IN_TEXT.sub(put, text)


def _history(record: Record, history: Any, pictures: Shown) -> list[Turn]:
    """Earlier rounds, as LLaMA-Factory and ms-swift write them: [question, answer] each; the answers are
    learned too.
    """
    rounds = parsed(history) if isinstance(history, str) else history
    if not isinstance(rounds, list | tuple) or not all(
        isinstance(one, list | tuple) and len(one) == 2 for one in rounds
    ):
        raise record.bad(f"its history is {shown(history)}, not a list of [question, answer]", "turns")
    turns = []
    for asked, answer in rounds:
        turns.append(Turn("user", _marked(record, record.text(asked, "history"), pictures)))
        _not_empty(record, text := record.text(answer, "history"))
        turns.append(Turn("assistant", _marked(record, text, pictures)))
    return turns


def _not_empty(record: Record, text: str) -> None:
    if not text.strip():
        raise record.bad("has an empty answer: there is nothing to learn from it", "empty answer")


# ---------------------------------------------------------------- question and answer, captions


def _question(record: Record, pictures: Shown) -> list[Turn]:
    """The two turns of a question (with options, or as instruction and input) and its answer, or of a
    caption without a question.
    """
    fields, read_before = record.fields, set(record.read)
    asked = next((name for name in ASKED if fields.get(name) is not None), None)
    answered = [
        name
        for name in (*ANSWERED, *SEVERAL_ANSWERS, MOST_FREQUENT)
        if name in fields and (name != "label" or asked == "query")
    ]
    question = "" if asked is None else record.text(fields[asked], asked)
    if asked == "instruction" and (more := record.take("input", "inputs", "context")) is not None:
        question = f"{question}\n{record.text(more, 'input')}"  # as LLaMA-Factory and ms-swift join them
    if asked is not None and (chosen := choice_question(record, question)) is not None:
        record.read.add(asked)
        return [Turn("user", _marked(record, chosen[0], pictures)), Turn("assistant", chosen[1])]
    if answered and (asked or any(fields[name] is not None for name in answered)):
        if asked is None and (
            empty := next(
                (name for name in ASKED if name in fields), "" if "answer" in answered else "question"
            )
        ):
            raise record.bad(f"its {empty} is null, not text: it has {record.field_names()}", "no text")
        record.read |= {asked} if asked else set()
        if (hint := record.take("hint")) is not None:
            question = f"{record.text(hint, 'hint')}\n{question}"
        answer = _answer(record, next((name for name in answered if fields[name] is not None), answered[0]))
        return [
            Turn("user", _marked(record, question, pictures)),
            Turn("assistant", _marked(record, answer, pictures)),
        ]
    record.read = read_before  # nothing of a question without an answer is used
    caption = next((name for name in CAPTION_FIELDS if fields.get(name) is not None), None)
    if caption is None:
        wanted = "conversations, messages, question + answer, instruction + output, or one of "
        wanted += ", ".join(CAPTION_FIELDS)
        raise record.bad(f"has no text: it has {record.field_names()}; it needs {wanted}", "no text")
    record.read.add(caption)
    value = fields[caption]
    if isinstance(value, list | tuple | np.ndarray) and len(value):
        if len({str(one) for one in value}) > 1:
            record.note("records have several captions, of which the first is learned")
        value = value[0]
    text = record.text(value, "caption")
    if not text.strip():
        raise record.bad("has an empty caption", "missing caption")
    return [Turn("user", ""), Turn("assistant", _marked(record, text, pictures))]


def _answer(record: Record, name: str) -> str:
    """The text of field ``name``. Of several accepted answers the most frequent, the first of those that
    are equally frequent, and where VQAv2 says which that is, as it says.
    """
    record.read.add(name)
    value = record.fields[name]
    if isinstance(value, str) and name in SEVERAL_ANSWERS and value.lstrip().startswith("["):
        value = parsed(value)
    if isinstance(value, list | tuple | np.ndarray) and len(value):
        texts = [
            record.text(one["answer"] if isinstance(one, Mapping) and "answer" in one else one, "answer")
            for one in value
        ]
        if len(counts := Counter(texts)) > 1:
            record.note("records have several accepted answers, of which the most frequent is learned")
        value = counts.most_common(1)[0][0]
        value = value if (told := record.take(MOST_FREQUENT)) is None else told
    text = record.text(value, "answer")
    _not_empty(record, text)
    return text
