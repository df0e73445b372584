"""`mmkit convert`: a published checkpoint into an export of ours, and back."""

from __future__ import annotations

import logging
from pathlib import Path

from mmkit.config import ClipConfig, ConfigError, ModelConfig, load
from mmkit.models import build, pretrained
from mmkit.models.convert import export, files, openclip, published

logger = logging.getLogger(__name__)


def import_published(source: str, target: str, preset: str | None = None, base: str | None = None, kind: str | None = None) -> str:
    """Writes the published checkpoint ``source`` as an export in ``target``; returns a line saying what was done.

    ``preset`` gives what a release does not say (encoders of a twin, where encoder weights lie) and is compared with it. ``base``
    and ``kind`` are those of `published.read`.
    """
    _check_new(target)
    wanted = load(preset, "eval").model if preset else None
    encoders = None if wanted is None or isinstance(wanted, ClipConfig) else wanted.encoders
    described = Path(source, openclip.CONFIG_FILE).is_file()
    if isinstance(wanted, ClipConfig) and base is None and not described:
        model, config = published.load(source, kind, wanted)
    else:
        model, config = published.load(source, kind, base, encoders)
    if wanted is not None:
        pretrained.check_same_architecture(wanted, config, source)
        config = wanted
    pretrained.save_pretrained(model, target, config, _tokenizer(config, files.locate(source)))
    return f"{source} -> {target}: {sum(p.numel() for p in model.parameters()):,} parameters"


def export_published(source: str, target: str, preset: str | None = None, kind: str | None = None) -> str:
    """Writes an export of ours, ``source``, in the layout of its system (or as ``kind`` of `export.WRITERS`) to ``target``."""
    model, config = pretrained.from_pretrained(source, merge=True)
    if preset:
        pretrained.check_same_architecture(load(preset, "eval").model, config, source)
    kind = kind or system_of_config(config)
    words = Path(source) / "tokenizer"
    tokenizer = build.tokenizer(config, words) if words.is_dir() else None
    return f"{source} -> {export.write(model, target, kind, tokenizer)} as {kind}"


def system_of_config(config: ModelConfig) -> str:
    """The published system whose layout fits a config: by its kind, its regions, and whether rows of the grid end in a newline."""
    if isinstance(config, ClipConfig):
        return "openclip"
    return "ferret" if config.regions else "cambrian" if config.connector.newline else "llava"


def _check_new(target: str) -> None:
    if Path(target).exists() and (not Path(target).is_dir() or any(Path(target).iterdir())):
        raise ConfigError(f"{target} exists and is not empty; name a new folder")


def _tokenizer(config: ModelConfig, source: Path):
    """The release's own tokenizer, else the config's; none, with a note, where neither can be read."""
    own = source if source.is_dir() and any(source.glob("tokenizer*")) else None
    try:
        return build.tokenizer(config, own)
    except ConfigError as error:
        logger.warning("the export has no tokenizer: %s", error)
        return None
