"""Readers, one a file format: a dataset is a `SourceConfig`, never code. Each gives a map-style source of examples."""

from __future__ import annotations

import csv
import functools
import glob
import hashlib
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mmkit.cache import atomic_write, cache_root
from mmkit.config import ConfigError, DataConfig, SourceConfig, nearest
from mmkit.data.example import BadRecord, Example
from mmkit.data.jsonl_index import JsonLines
from mmkit.data.mixture import Mixture, Source, example_length
from mmkit.data.recipe import sources_of
from mmkit.data.record_facts import facts
from mmkit.data.picture_fields import IMAGE_FIELDS
from mmkit.data.record import shown
from mmkit.data.records import CAPTION_FIELDS, example_of, is_record, key_of

LONGEST_CELL = 1 << 24  # characters of a CSV cell; the csv module's own limit of 131,072 is less than a long conversation
QUOTES = "A cell that begins with a quote must end with one, and quotes inside it are doubled"
STAMP_BLOCK, STAMP_BLOCKS = 1 << 18, 256  # bytes read at a place and places, of all files of a source: 64 MiB
LARGE_JSON = 1 << 26  # a JSON list beyond this size is rewritten once as JSONL in the cache, so that workers need not hold it


class RecordSource:
    """Examples of the records of a file, in any of the forms of docs/data-formats.md."""

    def __init__(self, name: str, records: Sequence[dict[str, Any]], folder: str | None, fingerprint: str = ""):
        self.name, self.records, self.folder, self.fingerprint = name, records, folder, fingerprint

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, index: int) -> Example:
        return self._made(index, lambda record, key: example_of(record, key, self.name, self.folder))

    def described(self, index: int) -> tuple[tuple[str, ...], int]:
        """(identities of the example's pictures, its words); none and 0 where it cannot be read."""
        try:
            example = self[index]
        except BadRecord:
            return (), 0
        return tuple(ref.identity for ref in example.images), example_length(example)

    @functools.cached_property
    def facts(self) -> dict[str, np.ndarray]:
        """``groups`` (the number of its pictures) and ``lengths`` (its words) of all examples, (n,) int64 each; read once and
        kept where reading is slow."""
        return facts(self.records, self.described, f"{type(self).__name__} {self.folder}")

    def _made(self, index: int, make: Callable[[dict[str, Any], str], Any]) -> Any:
        """``make`` of a record and its key. Whatever one record is like, its failure is a BadRecord that names it and ends no run."""
        if index >= len(self.records):
            raise IndexError(f"record {index} of {len(self.records)} in {self.name!r}")
        key = f"record {index + 1}"
        try:
            record = self.records[index]
            if not isinstance(record, dict):
                raise BadRecord(f"is a {type(record).__name__}, not an object", reason="no JSON")
            key = key_of(record, index)
            return make(record, key)
        except BadRecord as error:
            raise BadRecord(error.message, key=error.key or key, source=error.source or self.name, reason=error.reason) from error.__cause__
        except (TypeError, ValueError, LookupError, AttributeError) as error:
            message = f"cannot be read ({type(error).__name__}: {error})"
            raise BadRecord(message, key=key, source=self.name, reason="unreadable record") from error


class GritSource(RecordSource):
    """Examples of Ferret's GRIT records; `draw` chooses points or boxes as training does."""

    def draw(self, index: int, rng: np.random.Generator | None) -> Example:
        """The example with its user's regions as points or boxes, chosen by ``rng``; as boxes without it."""
        return self._made(index, lambda record, key: example_of(record, key, self.name, self.folder, rng))


def open_source(config: SourceConfig, data: DataConfig | None = None) -> Source:
    """The source of one config entry; ConfigError where its file is not there or not of its format."""
    reader = READERS.get(config.format)
    if reader is None:
        raise ConfigError(f"data.sources {config.name!r}: no format {config.format!r}{nearest(config.format, READERS)}; formats are {', '.join(READERS)}")
    if config.filters and config.format != "webdataset":
        raise ConfigError(
            f"data.sources {config.name!r}: filters look at the metadata of tar shards and would do nothing for format {config.format!r}; "
            "filter the file itself, or make shards of it (format webdataset)"
        )
    return reader(config, data or DataConfig())


def open_mixture(data: DataConfig) -> Mixture:
    """All sources of a run as one."""
    sources = sources_of(data)
    return Mixture(sources, [open_source(config, data) for config in sources], data.samples_per_epoch)


def open_validation(data: DataConfig) -> Mixture:
    """The held-out sources of a run as one, each example of them once; ConfigError as for `open_mixture`."""
    try:
        return open_mixture(held_out(data))
    except ConfigError as error:
        raise ConfigError(str(error).replace("data.sources", "data.validation")) from None


def held_out(data: DataConfig) -> DataConfig:
    """The settings under which ``data.validation`` is read: as training data, but in one pass without repeats."""
    sources = {"sources": data.validation, "mixture": None}
    return data.model_copy(update=sources | {"samples_per_epoch": None, "resampled": False})


def records_of(path: str | os.PathLike) -> Sequence[dict[str, Any]]:
    """Records of a JSONL file, or of a JSON file that holds a list; ConfigError otherwise."""
    path = _found(path, "data file")
    with path.open("rb") as file:
        first = file.read(1 << 16).lstrip(b"\xef\xbb\xbf \t\r\n")[:1]
    if not first:
        raise ConfigError(f"data file {path} is empty; it needs one JSON object a line, or a JSON list of objects")
    if first == b"{":
        _refuse_one_object(path)
        return JsonLines(path)
    if first == b"[":
        return _json_list(path)
    raise ConfigError(f"data file {path} is neither JSONL (one object a line) nor a JSON list of objects; other formats are {', '.join(READERS)}")


def _found(path: str | os.PathLike, what: str) -> Path:
    """The path of a file on a disk; ConfigError, beginning with ``what``, where it is a URL or not there."""
    if "://" in str(path):
        raise ConfigError(f"{what} {path} is a URL, but this format is read from a disk; download it, or make shards of it (format webdataset)")
    path = Path(path)
    if not path.is_file():
        near = nearest(path.name, [other.name for other in path.parent.glob("*")]) if path.parent.is_dir() else ""
        raise ConfigError(f"{what} {path.absolute()} does not exist{near}")
    return path


def _refuse_one_object(path: Path) -> None:
    """ConfigError where a file holds one JSON object and no records, with its form and what to make of it.

    So GQA's questions are published, the annotations of VQA and COCO, ScienceQA's problems and SQuAD-like data.
    """
    with path.open("rb") as file:
        line = file.readline(LARGE_JSON).removeprefix(b"\xef\xbb\xbf").strip()
        more = file.read(1 << 16).strip()
    try:
        found = json.loads(line)
        if more or not isinstance(found, dict) or is_record(found):
            return
    except (ValueError, RecursionError):
        if len(line) < LARGE_JSON // 2 and line not in (b"{", b'{"') and not line.endswith((b"{", b"[", b",")):
            return  # a damaged line of JSONL, counted where it is read
        try:
            found = _loaded(path) if path.stat().st_size < 8 * LARGE_JSON else {}
        except ConfigError:
            found = {} if line == b"{" else None
        if not isinstance(found, dict):
            return
    keys = ", ".join(shown(str(key)) for key in list(found)[:3]) + (f", ... {len(found):,} in all" if len(found) > 3 else "")
    lists = {key: value for key, value in found.items() if isinstance(value, list) and value and isinstance(value[0], dict)}
    if {"images", "annotations"} <= lists.keys():
        form = "COCO form; make one line a picture, with its captions, or its boxes as GRIT has them"
    elif {"questions", "annotations"} & lists.keys():
        form = "VQA form; make one line a question, with the picture, question and answers that its question_id joins"
    elif lists:
        name, rows = max(lists.items(), key=lambda pair: len(pair[1]))
        form = f"the {len(rows):,} objects of {shown(name)} may be records; write that list to a file of its own"
    elif found and all(isinstance(value, dict) for value in found.values()):
        asks = any("question" in value for value in found.values())
        form = "GQA form; make one line a question, its key as id" if asks else "make one line of each object, its key as id"
    else:
        form = "write one record a line (JSONL), or a JSON list of records"
    raise ConfigError(f"data file {path} holds one JSON object (keys {keys or 'not read'}), not records: {form}")


def _json_list(path: Path) -> Sequence[dict[str, Any]]:
    facts = path.stat()
    if facts.st_size < LARGE_JSON:
        return _loaded(path)
    name = hashlib.sha256(f"{path.resolve()} {facts.st_size} {facts.st_mtime_ns}".encode()).hexdigest()[:16]
    copy = cache_root() / "json-lists" / f"{path.stem}-{name}.jsonl"
    if not copy.exists():
        with atomic_write(copy) as work, work.open("w", encoding="utf8") as out:
            out.writelines(json.dumps(record, ensure_ascii=False) + "\n" for record in _loaded(path))
    return JsonLines(copy)


def _loaded(path: Path) -> list:
    try:
        return json.loads(path.read_text(encoding="utf-8-sig"))
    except ValueError as error:
        raise ConfigError(f"data file {path} is no JSON: {error}") from None


def _folder(config: SourceConfig) -> str:
    return config.images if config.images is not None else str(Path(config.path).parent)


def open_llava(config: SourceConfig, data: DataConfig) -> RecordSource:
    """LLaVA and Cambrian JSON or JSONL: id, image (absent, empty, one or several), conversations."""
    return RecordSource(config.name, records_of(config.path), _folder(config), _stamp(config.path))


def open_grit(config: SourceConfig, data: DataConfig) -> GritSource:
    """Ferret JSON or JSONL: LLaVA's fields, image_w, image_h, box_x1y1x2y2 and masks for each message."""
    return GritSource(config.name, records_of(config.path), _folder(config), _stamp(config.path))


def open_csv(config: SourceConfig, data: DataConfig) -> RecordSource:
    """A CSV or TSV file with a header: a picture column (filepath, image ...) and a caption, or question and answer."""
    rows = CsvRows(_found(config.path, f"data.sources {config.name!r}: file"), config.name)
    if not set(rows.header) & {*IMAGE_FIELDS, *CAPTION_FIELDS, "answer"}:
        raise ConfigError(
            f"data.sources {config.name!r}: the first line of {config.path} is {','.join(rows.header)[:60]!r}; it needs columns, with commas or tabs "
            f"between them: one of {', '.join(IMAGE_FIELDS)}, and one of {', '.join(CAPTION_FIELDS)} or question and answer"
        )
    return RecordSource(config.name, rows, _folder(config), _stamp(config.path))


class CsvRows(Sequence):
    """The rows of a CSV or TSV file as dictionaries, in memory. ConfigError where the file cannot be cut into rows."""

    def __init__(self, path: Path, source: str):
        self.path, self.source, self.header, self.rows = path, source, [], []
        self.faults: dict[int, str] = {}  # of rows that are not one cell a column: number -> what is wrong
        limit = csv.field_size_limit(LONGEST_CELL)
        try:
            with path.open(newline="", encoding="utf-8-sig") as file:
                delimiter = "\t" if "\t" in file.readline() else ","
                file.seek(0)
                self._read(csv.reader(file, delimiter=delimiter, strict=True))  # else a quote left open swallows the rest of the file
        except UnicodeDecodeError:
            raise ConfigError(f"data.sources {source!r}: {path} line {_undecodable(path)} is not UTF-8; save the file as UTF-8") from None
        finally:
            csv.field_size_limit(limit)

    def _read(self, reader: Any) -> None:
        while True:
            begins = reader.line_num + 1
            try:
                cells = next(reader, None)
            except csv.Error as error:
                if not self.header or reader.line_num > begins:  # it has swallowed lines that may have been rows
                    raise ConfigError(
                        f"data.sources {self.source!r}: {self.path} line {reader.line_num}: {error}; the row begins in line {begins}. {QUOTES}"
                    ) from None
                self.faults[len(self.rows)] = f"line {begins} of {self.path}: {error}. {QUOTES}"
                cells = ["?"]
            if cells is None:
                return
            if not self.header:
                self.header = cells
            elif cells:
                if len(cells) != len(self.header):
                    counts = f"{len(cells)} cells for {len(self.header)} columns"
                    self.faults.setdefault(len(self.rows), f"line {begins} of {self.path} has {counts}; put quotes round a cell with a comma in it")
                self.rows.append(cells)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, number: int) -> dict[str, str]:
        """The row of a number; BadRecord where it has not one cell a column."""
        if number in self.faults:
            raise BadRecord(self.faults[number], reason="cell count")
        return dict(zip(self.header, self.rows[number], strict=True))


def _undecodable(path: Path) -> int:
    """Number of the first line that is not UTF-8."""
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            try:
                line.decode()
            except UnicodeDecodeError:
                return number
    return 0


def open_parquet(config: SourceConfig, data: DataConfig) -> RecordSource:
    """Parquet files (a file, folder or pattern) or a Hugging Face data set by name; pictures stay encoded until they are used."""
    try:
        import datasets
    except ImportError:
        raise ConfigError(f"data.sources {config.name!r}: format parquet needs the `datasets` package; pip install mmkit[datasets]") from None
    path = config.path
    if "://" in path:
        raise ConfigError(f"data.sources {config.name!r}: {path} is a URL; give files on a disk, or the name of a Hugging Face data set")
    files = sorted(glob.glob(f"{path}/**/*.parquet", recursive=True) if os.path.isdir(path) else glob.glob(path))
    if not files and (path.startswith((".", "/")) or path.endswith(".parquet")):
        raise ConfigError(f"data.sources {config.name!r}: no parquet file at {path}")
    datasets.disable_progress_bars()
    try:
        if files:
            table = datasets.load_dataset("parquet", data_files=files, split="train", cache_dir=str(cache_root() / "datasets"))
        else:
            table = datasets.load_dataset(path, split=config.split)
    except (datasets.exceptions.DatasetsError, OSError, ValueError) as error:
        what = f"{_damaged_parquet(files) or path} cannot be read as parquet" if files else f"the set {path!r} cannot be loaded"
        raise ConfigError(f"data.sources {config.name!r}: {what} ({error.__cause__ or error})") from error
    return RecordSource(config.name, TableRows(table), config.images, _stamp(*files) if files else str(getattr(table, "_fingerprint", "")))


class TableRows(Sequence):
    """The rows of a Hugging Face table as plain data: pictures stay encoded wherever they stand, in lists too."""

    def __init__(self, table):
        self.table = table.with_format("arrow")

    def __len__(self) -> int:
        return len(self.table)

    def __getitem__(self, number: int) -> dict[str, Any]:
        return self.table[number].to_pylist()[0]


def _damaged_parquet(files: Sequence[str]) -> str | None:
    """The first file whose directory, which stands at its end, cannot be read."""
    import pyarrow.parquet

    for file in files:
        try:
            pyarrow.parquet.read_metadata(file)
        except (OSError, pyarrow.ArrowException):
            return file
    return None


def open_pack(config: SourceConfig, data: DataConfig) -> Source:
    """A pack of the offline data, by name."""
    from mmkit.data.demo import open_pack

    return open_pack(config.path, config.split)


def open_webdataset(config: SourceConfig, data: DataConfig) -> Source:
    """Tar shards."""
    from mmkit.data.shards import open_shards

    return open_shards(config, data)


READERS: dict[str, Callable[[SourceConfig, DataConfig], Source]] = {
    "llava": open_llava,
    "grit": open_grit,
    "parquet": open_parquet,
    "csv": open_csv,
    "pack": open_pack,
    "webdataset": open_webdataset,
}


def _stamp(*paths: str) -> str:
    """What a resumed run compares: sizes and a hash of the content, of which a copy on another machine has the same.

    Up to 64 MiB are hashed whole. Of more, each file's head, tail and blocks evenly between: a few edited records between them go unseen.
    """
    hashed, places = hashlib.blake2b(digest_size=8), max(2, STAMP_BLOCKS // len(paths))
    for path in paths:
        size = os.stat(path).st_size
        hashed.update(f"{size} ".encode())
        whole = size <= places * STAMP_BLOCK
        starts = range(0, size, STAMP_BLOCK) if whole else np.linspace(0, size - STAMP_BLOCK, places).astype(np.int64).tolist()
        with open(path, "rb") as file:
            for start in starts:
                file.seek(start)
                hashed.update(file.read(STAMP_BLOCK))
    return hashed.hexdigest()
