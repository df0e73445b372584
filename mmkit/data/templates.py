"""Chat templates as plain data, and rendering to text with the character spans that carry loss.

The strings are those the published weights were trained with: Cambrian-1 (llama_3, vicuna_v1, cambrian_v1, chatml_direct, phi3,
mistral_instruct), Ferret (ferret_v1) and LLaVA stage 1 (plain); trailing spaces and missing line breaks are part of them.
``short`` is ours: few tokens around a question, for small models trained from a plain language model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from jinja2 import TemplateError

from mmkit.data.example import IMAGE, Turn
from mmkit.errors import InputError

EOS = "</s>"  # in a template: the tokenizer's own end-of-sequence token

_VICUNA_SYSTEM = (
    "A chat between a curious {user} and an artificial intelligence assistant. The assistant gives helpful, detailed, and polite "
    "answers to the {user}'s questions."
)
_CAMBRIAN_PARTS = (
    "You are Cambrian, a highly intelligent multimodal AI trained by NYU Vision X. ",
    "As a multimodal AI, you have the ability to process and analyze images. Whenever an image is present in the conversation, "
    "very carefully examine it and consider its content when formulating your response.",
    "You should give concise responses to very simple questions, but provide thorough responses to more complex and open-ended questions.",
)
_FERRET_SYSTEM = (
    "A chat between a human and an AI that understands visuals. In images, [x, y] denotes points: top-left [0, 0], bottom-right "
    "[width-1, height-1]. Increasing x moves right; y moves down. Bounding box: [x1, y1, x2, y2]. Image size: 1000x1000. "
    "Follow instructions. "
)


@dataclass(frozen=True)
class Template:
    """Layout of a conversation: system part, then for each round ``user`` + ``open`` + answer, rounds joined by ``gap``.

    The trained span of an answer is ``lead`` + text + ``end``. A format without ``{text}`` drops that part's words.
    """

    user: str
    open: str
    end: str
    lead: str = ""
    gap: str = ""
    start: str = ""  # before everything, also without a system text
    system: str = "{text}"
    default_system: str = ""
    system_in_user: str = ""  # where the system text belongs inside the first user message: a format with {system} and {text}
    images_only: bool = False  # the user's words are dropped, its images stay


_VICUNA = Template(user="USER: {text} ", open="ASSISTANT:", lead=" ", end=EOS, system="{text} ")
TEMPLATES: dict[str, Template] = {
    "llama_3": Template(
        start="<|begin_of_text|>",
        system="<|start_header_id|>system<|end_header_id|>{text}<|eot_id|>",
        default_system="{0}\n    {1}\n    {2} ".format(*_CAMBRIAN_PARTS),
        user="<|start_header_id|>user<|end_header_id|>{text}<|eot_id|>",
        open="<|start_header_id|>assistant<|end_header_id|>",
        end="<|eot_id|>",
    ),
    "vicuna_v1": Template(**(vars(_VICUNA) | {"default_system": _VICUNA_SYSTEM.format(user="user")})),
    "cambrian_v1": Template(**(vars(_VICUNA) | {"default_system": _VICUNA_SYSTEM.format(user="human")})),
    "ferret_v1": Template(**(vars(_VICUNA) | {"default_system": _FERRET_SYSTEM})),
    "chatml_direct": Template(
        system="<|im_start|>system\n{text}<|im_end|>",
        default_system="{0}{1} {2}".format(*_CAMBRIAN_PARTS),
        user="<|im_start|>user\n{text}<|im_end|>",
        open="<|im_start|>assistant\n",
        end="<|im_end|>",
    ),
    "phi3": Template(
        system="<|system|>\n{text}<|end|>\n",
        default_system="You are a helpful AI assistant.",
        user="<|user|>\n{text}<|end|>\n",
        open="<|assistant|>\n",
        end="<|end|>",
        gap="\n",
    ),
    "mistral_instruct": Template(
        user="[INST] {text} [/INST]", open="", lead=" ", end=" " + EOS, system_in_user="<<SYS>>\n{system}\n<</SYS>>\n\n{text}"
    ),
    "plain": Template(user="{text}", open="", end="\n", images_only=True),
    "short": Template(user="{text}\n", open="A:", lead=" ", end=EOS, gap="\n"),
}


@dataclass(frozen=True)
class Rendered:
    """The text of a conversation and the (start, end) character spans that carry loss."""

    text: str
    spans: tuple[tuple[int, int], ...]


def render(template: Template, turns: Sequence[Turn], generate: bool = False, eos: str = EOS) -> Rendered:
    """The conversation in ``template``; with ``generate`` it ends where the next answer begins. ``eos`` replaces `EOS`.

    ``turns`` must alternate user, assistant, ... after an optional system turn; ValueError otherwise.
    """
    system, turns = split_system(turns)
    system = template.default_system if system is None else system
    parts = [template.start]
    if system and not template.system_in_user:
        parts.append(template.system.format(text=system))
    spans, length = [], sum(map(len, parts))
    for number, turn in enumerate(turns):
        if turn.role == "user":
            text = IMAGE * turn.text.count(IMAGE) if template.images_only else turn.text
            if number == 0 and system and template.system_in_user:
                text = template.system_in_user.format(system=system, text=text)
            piece = (template.gap if number else "") + template.user.replace("{text}", text)
        else:
            answer = template.lead + turn.text + template.end.replace(EOS, eos)
            piece = template.open + answer
            if turn.trained:
                spans.append((length + len(template.open), length + len(piece)))
        parts.append(piece)
        length += len(piece)
    if generate:
        parts.append(template.open)
    return Rendered("".join(parts), tuple(spans))


def render_with_tokenizer(tokenizer, turns: Sequence[Turn], generate: bool = False) -> Rendered:
    """The conversation in the tokenizer's own chat template; spans run from the generation prompt to the
    end-of-turn token.

    InputError for a conversation that the template refuses (a system role, say), in the template's words, or
    of which it leaves text out.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise InputError(f"template 'tokenizer' needs a chat template, but {type(tokenizer).__name__} has none; name one of {', '.join(TEMPLATES)}")
    split_system(turns)
    messages = [{"role": turn.role, "content": turn.text} for turn in turns]

    def text_of(count: int, add: bool) -> str:
        try:
            return tokenizer.apply_chat_template(messages[:count], tokenize=False, add_generation_prompt=add)
        # the template's own raise_exception, or what becomes of a message that it was not written for
        except (TemplateError, TypeError, KeyError) as error:
            said = f"{str(error).strip() or type(error).__name__}{_system_hint(turns)}"
            raise InputError(f"the tokenizer's chat template refuses this conversation: {said}") from None

    text, place = text_of(len(messages), generate), 0
    for number, turn in enumerate(turns):
        found = text.find(turn.text.strip(), place)
        if found < 0:
            raise InputError(
                f"the tokenizer's chat template leaves out text of the {turn.role} turn {number + 1}: "
                + repr(turn.text.strip()[:40])
                + (_system_hint(turns) if turn.role == "system" else "; name another template")
            )
        place = found + len(turn.text.strip())
    spans = []
    for number, turn in enumerate(turns):
        if turn.role != "assistant" or not turn.trained:
            continue
        before, after = text_of(number, True), text_of(number + 1, False)
        if not (after.startswith(before) and text.startswith(after)):
            raise InputError("the tokenizer's chat template rewrites earlier turns, so answers have no fixed place in it; name another template")
        tail = after[len(before) :].rpartition(turn.text.strip())[2] if turn.text.strip() else after[len(before) :]
        spans.append((len(before), len(after) - (len(tail) - len(tail.rstrip()))))
    return Rendered(text, tuple(spans))


def _system_hint(turns: Sequence[Turn]) -> str:
    """What to do where a template has no place for a system text."""
    hint = "; put the system text into the first question, or name another template (model.template)"
    return hint if turns and turns[0].role == "system" else ""


def split_system(turns: Sequence[Turn]) -> tuple[str | None, Sequence[Turn]]:
    """(system text or None, the other turns); ValueError unless the others alternate user, assistant, user, ..."""
    system = turns[0].text if turns and turns[0].role == "system" else None
    rest = turns[1:] if system is not None else turns
    for number, turn in enumerate(rest):
        wanted = ("user", "assistant")[number % 2]
        if turn.role != wanted:
            raise InputError(f"turn {number + 1} is from {turn.role!r} where {wanted!r} is due; roles must alternate, starting with user")
    return system, rest


def image_first(text: str) -> str:
    """A user message with its one image marker moved to the front on a line of its own, as Cambrian and LLaVA train (section 1.8)."""
    return f"{IMAGE}\n{text.replace(IMAGE, '').strip()}".strip() if IMAGE in text else text
