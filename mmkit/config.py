"""Every setting of a run: typed, frozen, checked where text becomes a config and nowhere else.

``load("tiny", stage="finetune", overrides={"lr": 1e-4})`` reads ``params/tiny.yaml``, lays it over its ``base:``, adds the
stage's section, then the overrides, and returns one immutable `RunConfig`. An unknown name, a value of the wrong type or an
impossible combination is a `ConfigError` that says which field, which value, where it came from and the nearest right name.
"""

from __future__ import annotations

import typing
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BeforeValidator, Field, TypeAdapter, ValidationError, model_validator

from mmkit import rules
from mmkit.errors import ConfigError
from mmkit.presets import merge, origin, preset_tree, read_mapping
from mmkit.values import Free, Settings, example, explain, hint, kinds_at, kinds_of, listed, names_of, nearest, parsed, shortened

Stage = Literal["pretrain", "finetune", "eval"]
Precision = Literal["fp32", "tf32", "bf16", "fp16"]
Component = Literal["language", "connector", "samplers", "regions", "encoders", "image", "text", "scale"]
Digits = BeforeValidator(lambda value: int(value) if isinstance(value, str) and value.strip().isdigit() else value)  # for Literal numbers
IMAGE_TOKEN_INDEX = -200  # stands for one image slot in input_ids; never a vocabulary id
REGION_TOKEN_INDEX = -300  # stands for one region token in input_ids
MOST_TRIED = 100_000  # batches of a device that a message looks through for ones that divide a batch
Fraction = Annotated[float, Field(gt=0, le=1)]
Count = Annotated[int, Field(gt=0)]
IGNORE_INDEX = -100  # a label that carries no loss


class EncoderConfig(Settings):
    """One vision encoder: a name of `models.encoders.ENCODERS` or ``open_clip:NAME``, ``timm:NAME``, ``hf:NAME``."""

    name: str  # as in models/encoders.py, or open_clip:NAME, timm:NAME, hf:NAME
    side: int = Field(gt=0)  # token grid handed to the connector is side x side
    resolution: int | None = Field(None, gt=0)  # pixels; None = the table's own
    weights: str | None = None  # local folder or file; None = the table's source, "random" = untrained
    architecture: dict[str, Free] | None = None  # sizes of a small twin, in the encoder family's own field names
    standardise: bool = False  # channels shifted and scaled by the table's measured statistics


class ConnectorConfig(Settings):
    """What turns encoder grids into language-model tokens (reference: Cambrian-1 section 3, LLaVA-1.5)."""

    kind: Literal["sva", "mlp", "linear", "identity"] = "sva"  # SVA, an MLP, one linear layer, or the grid as it is
    width: int = Field(1024, gt=0)  # V, `vision_hidden_size`
    heads: int = Field(16, gt=0)  # of each SVA layer's attention
    layer: Literal["joint", "separate"] = "joint"  # of SVA: one attention over all encoders (published), or one each, mixed
    depth: int = Field(3, ge=1)  # SVA layers, or linear layers of the MLP
    query_sides: tuple[Count, ...] = Field((24,), min_length=1)  # one learned query a group, on a grid of this side
    grid_side: int | None = Field(None, gt=0)  # of the grid the language model sees; None = the largest query side
    newline: bool = True  # one learned token after each row of the grid
    match_embeddings: bool = False  # an untrained connector starts with tokens centred and spread like text embeddings


class SamplersConfig(Settings):
    """In-LLM SVA: after decoder layers start, start + stride, ... (count of them)."""

    start: int = Field(0, ge=0)  # the first decoder layer with one after it
    stride: int = Field(1, ge=1)  # decoder layers between two
    count: int = Field(ge=1)  # how many


class RegionConfig(Settings):
    """Region features (Ferret): spatial-aware sampler ``geo`` or the mean of points ``mean``."""

    kind: Literal["geo", "mean"] = "geo"  # spatial-aware sampler, or the mean of the region's points
    n_points: int = Field(512, gt=0)  # points drawn in a region
    n_sub_points: tuple[Count, ...] = Field((128, 32), min_length=1)  # points left after each stage of the sampler
    n_neighbors: tuple[Count, ...] = Field((24, 24), min_length=1)  # neighbours pooled around each, a stage
    pool: Literal["max", "mean"] = "max"  # over neighbours
    transposed: bool = False  # True reads features at (y, x) as the published weights expect
    encoder: int = Field(0, ge=0)  # which encoder's unprojected grid is sampled
    token: str = "<region_fea>"  # of the text, that a region's features replace


class LanguageConfig(Settings):
    """A Hugging Face causal language model."""

    source: str  # hub id, local folder, "pack:smollm2" (offline demo weights) or "random"
    architecture: dict[str, Free]  # transformers config fields incl. model_type: full size without a download
    tokenizer: str | None = None  # hub id, folder, "pack:smollm2", "bytes" (offline, for debug twins); None = source
    stop_tokens: tuple[str, ...] = ()  # end-of-turn strings that stop generation besides eos
    padding_side: Literal["left", "right"] = "right"  # of a row's padding


class VlmConfig(Settings):
    """Encoders -> connector -> language model, with optional in-LLM samplers and regions."""

    kind: Literal["vlm"] = "vlm"  # a vision-language model
    encoders: tuple[EncoderConfig, ...] = Field(min_length=1)  # vision encoders, the first gives the global context
    connector: ConnectorConfig = ConnectorConfig()  # between encoders and language model
    samplers: SamplersConfig | None = None  # SVA layers inside the language model; None = none
    language: LanguageConfig  # the language model
    regions: RegionConfig | None = None  # features of regions; None = none
    template: str = "vicuna_v1"  # a name of data.conversation.TEMPLATES, or "tokenizer" for the tokenizer's own
    image_fit: Literal["pad", "square", "stretch"] = "pad"  # letter-box, centre crop, resize without keeping aspect
    crop_padding: bool = False  # True drops padded grid cells from the sequence, False keeps them masked (fixed shapes)

    _consistent = model_validator(mode="after")(rules.check_vlm)

    @property
    def grid_side(self) -> int:
        """Side q of the image grid the language model sees."""
        return self.connector.grid_side or max(self.connector.query_sides) if self.connector.kind == "sva" else self.encoders[0].side

    @property
    def n_image_tokens(self) -> int:
        """Image slots of one unpadded image in the sequence: q * (q + 1) with newlines."""
        return self.grid_side * (self.grid_side + int(self.connector.newline))


class ClipConfig(Settings):
    """A contrastive image-text model, built by open_clip."""

    kind: Literal["clip"] = "clip"  # a contrastive model
    name: str  # open_clip model name, or a name defined by `architecture`
    architecture: dict[str, Free] | None = None  # an open_clip JSON config, for models open_clip does not list
    weights: str | None = None  # open_clip pretrained tag, file, or None for untrained
    tower_packs: tuple[str, ...] = ()  # offline weights for towers: "lite0" (image), "minilm" (text)
    lock_image: bool = False  # the image tower stays frozen
    lock_image_unlocked_groups: int = Field(0, ge=0)  # its last groups of layers that are trained all the same
    lock_text: bool = False  # the text tower stays frozen
    lock_text_unlocked_layers: int = Field(0, ge=0)  # its last layers that are trained all the same
    patch_dropout: float = Field(0.0, ge=0, lt=1)  # fraction of patches left out while training
    context_length: int | None = Field(None, gt=2)  # text tokens of a caption; None = the architecture's
    token_reduction: Literal["simple", "random", "shuffle", "syntax"] | None = None  # how longer captions are cut; None = their end
    int8_linear: str | None = None  # a bitsandbytes layer for the MLPs' c_fc and c_proj, as SwitchBackLinearGlobal
    init_logit_scale: float = 2.6592600369327783  # ln(1 / 0.07)
    init_logit_bias: float | None = None  # SigLIP: -10
    mean: tuple[float, float, float] | None = None  # image normalisation; None = open_clip's own
    std: tuple[float, float, float] | None = None  # the same, deviation of each channel


ModelConfig = Annotated[VlmConfig | ClipConfig, Field(discriminator="kind")]


class FilterRule(Settings):
    """One metadata rule of a tar source; a sample failing it is dropped and counted."""

    key: str  # a field of the sample's json
    op: Literal["<", "<=", ">", ">=", "==", "!=", "in", "not in"]  # how the field is compared
    value: Free  # with what
    if_missing: Literal["keep", "drop"] = "drop"  # a sample without the field


class SourceConfig(Settings):
    """One named source of examples; a dataset is an entry here, never code."""

    name: str  # for messages and counts
    format: Literal["llava", "grit", "parquet", "webdataset", "csv", "pack"]  # how its records are read
    path: str  # file, folder, brace pattern, URL, or the pack's name
    images: str | None = None  # folder that relative image paths start from
    split: str = "train"  # of a pack or hub data set
    weight: float | None = Field(None, gt=0)  # share of the mixture; None = its size
    multiple: float | None = Field(None, gt=0)  # Ferret's data_multiple: whole repeats plus a random fraction an epoch
    cap: int | None = Field(None, gt=0)  # Cambrian's threshold t: at most this many samples
    category: str = "general"  # of the sources whose shares are set together
    filters: tuple[FilterRule, ...] = ()  # of samples in tar shards, by their json


class DataConfig(Settings):
    """Where examples come from and how they become batches."""

    sources: tuple[SourceConfig, ...] = ()  # what is trained on
    mixture: str | None = None  # a file of params/mixtures, as cambrian_7m, in place of `sources`
    mixture_root: str = "data"  # folder of its files: ROOT/NAME.jsonl, picture paths start from ROOT/images
    validation: tuple[SourceConfig, ...] = ()  # held-out sources of eval_loss, read whole every train.eval_every steps
    max_length: int = Field(2048, gt=0)  # tokens of one row, image slots included
    buckets: tuple[Count, ...] = ()  # static row lengths; empty = only max_length
    max_images: int = Field(1, ge=1)  # image places of one row
    max_regions: int = Field(0, ge=0)  # region places of one row
    pack: bool = False  # several conversations share one row
    share_image: bool = False  # all questions about one image share one row and one copy of the image
    group_by_length: bool = False  # the original's group_by_modality_length, seeded
    workers: int = Field(0, ge=0)  # processes that read and decode, for each training process; 0 = none
    cache_features: bool = False  # keep the features of frozen encoders on disk
    cache_dir: str | None = None  # None = $MMKIT_CACHE or ~/.cache/mmkit
    too_long: Literal["drop", "truncate"] = "drop"  # a conversation longer than max_length; never bad
    max_bad_share: float = Field(0.01, ge=0, le=1)  # stop when more than this share of records is bad
    resampled: bool = False  # tar shards drawn with replacement
    samples_per_epoch: int | None = Field(None, gt=0)  # virtual epoch; None = the data's size
    caption_key: str = "txt"  # file ending of captions in tar shards, or json:FIELD
    augment_scale: tuple[Fraction, Fraction] = (0.9, 1.0)  # RandomResizedCrop of contrastive training


class LoraConfig(Settings):
    """Adapters by peft on the linear layers of named components."""

    rank: int = Field(64, gt=0)  # r, the width of an adapter
    alpha: float = Field(16, gt=0)  # updates are scaled by alpha / rank
    dropout: float = Field(0.05, ge=0, lt=1)  # before an adapter
    targets: tuple[str, ...] = ()  # full-name patterns (regex); empty = every linear layer but the head
    components: tuple[Component, ...] = ("language",)  # whose linear layers get adapters
    modules_to_save: tuple[str, ...] = ()  # modules trained whole beside the adapters, by name
    use_rslora: bool = False  # updates are scaled by alpha / sqrt(rank)
    use_dora: bool = False  # magnitude and direction apart


class OptimizerConfig(Settings):
    """AdamW and its schedule."""

    lr: float = Field(2e-5, gt=0)  # peak learning rate
    lr_of: dict[Component, Annotated[float, Field(gt=0)]] = {}  # own learning rate of a component
    weight_decay: float = Field(0.0, ge=0)  # of matrices; norms and biases have none
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (0.9, 0.999)  # decay of AdamW's two moments
    eps: float = Field(1e-8, ge=0)  # added to the root of the second moment
    kind: Literal["adamw", "adamw_8bit"] = "adamw"  # moments in fp32 or in 8 bits
    warmup: float = Field(0.03, ge=0)  # below 1: share of all steps; else steps
    schedule: Literal["cosine", "linear", "constant", "const-cooldown", "plateau"] = "cosine"  # of the learning rate after the warm-up
    cooldown: float = Field(0.0, ge=0)  # const-cooldown: last share (< 1) or steps
    max_grad_norm: float | None = Field(1.0, gt=0)  # gradients are clipped to it; None = not clipped


class StabilityConfig(Settings):
    """What is watched each step and what is done on a spike or a non-finite loss."""

    action: Literal["stop", "skip", "rewind"] = "stop"  # on a loss spike or a value that is not finite
    window: int = Field(64, ge=4)  # steps whose losses a spike is judged by
    threshold: float = Field(20.0, gt=0)  # spike: loss > median + threshold * MAD of the window
    max_skipped: int = Field(20, ge=0)  # consecutive skipped updates before the run stops
    rewind_precision: Precision | None = None  # precision after a rewind
    rewind_lr_factor: float = Field(1.0, gt=0, le=1)  # on the learning rate after a rewind
    max_rewinds: int = Field(3, ge=0)  # then the run stops


class CheckpointConfig(Settings):
    """When checkpoints are written and which are kept."""

    save_every: int = Field(0, ge=0)  # steps; 0 = only at the end
    save_samples: int = Field(0, ge=0)  # the same, counted in rows of the global batch
    keep_last: int = Field(3, ge=1)  # the newest so many
    keep_every: int = Field(0, ge=0)  # checkpoints whose step it divides are kept for ever; 0 = none
    best_metric: str | None = None  # the value of metrics.jsonl that decides the best checkpoint and a plateau; None = no best, eval_loss
    best_mode: Literal["min", "max"] = "min"  # whether less or more is better
    background: bool = False  # copy to host, write while training goes on
    on_disk_full: Literal["stop", "continue"] = "stop"  # where the storage refuses a checkpoint; any other failure stops


class ContrastiveConfig(Settings):
    """The loss of clip models."""

    kind: Literal["clip", "siglip", "coca", "distill"] = "clip"  # the loss
    local_loss: bool = True  # each process compares its own rows with all (the same sum, less memory)
    gather_with_grad: bool = True  # gradients flow through gathered features
    siglip_exchange: Literal["gather", "bidir", "shift", "reduce"] = "gather"  # how SigLIP's texts travel between processes
    logits_fp32: bool = True  # similarities are computed in fp32 whatever the precision
    chunk: int = Field(0, ge=0)  # rows of the similarity at a time; 0 = all
    distill_from: str | None = None  # open_clip name of the teacher
    distill_weights: str | None = None  # the teacher's weights, a tag or file
    unmasked_last: float = Field(0.0, ge=0, le=1)  # last share of training without patch dropout


class TrainConfig(Settings):
    """One stage of training."""

    trainable: tuple[Component, ...] = ("connector", "samplers")  # components with all their weights trained
    lora: LoraConfig | None = None  # adapters; None = none, {} = with the values below
    new_tokens: Literal["all", "rows"] = "all"  # rows: of embedding and head those of added tokens alone
    bits: Annotated[Literal[4, 8, 16], Digits] = 16  # storage of frozen language-model weights
    optimizer: OptimizerConfig = OptimizerConfig()  # AdamW and its schedule
    precision: Precision = "bf16"  # of computing; trained weights are kept in fp32
    global_batch: int = Field(128, gt=0)  # rows of one optimizer step over all devices
    device_batch: int = Field(8, gt=0)  # rows of one forward on one device
    epochs: float = Field(1.0, gt=0)  # passes over the data; steps wins where it is set
    steps: int | None = Field(None, gt=0)  # stops after so many optimizer steps; None = epochs
    checkpoint_blocks: bool = False  # recompute activations block by block
    loss_chunk: int = Field(0, ge=0)  # positions per lm_head call; 0 = all supervised positions at once
    log_every: int = Field(1, ge=1)  # steps between reads of the device and lines of metrics.jsonl
    eval_every: int = Field(0, ge=0)  # steps (eval_unit) between measurements of data.validation and evaluation.tasks; 0 = never
    eval_unit: Literal["steps", "epochs"] = "steps"  # an epoch is data.samples_per_epoch where that is set
    tensorboard: bool = False  # the numbers of metrics.jsonl in ROOT/MODEL/STAGE/NAME/tensorboard as well
    allow_no_grad: tuple[str, ...] = ()  # patterns of trainable tensors that may stay without a gradient
    contrastive: ContrastiveConfig = ContrastiveConfig()  # the loss of clip models
    stability: StabilityConfig = StabilityConfig()  # what is done on a loss spike
    checkpoint: CheckpointConfig = CheckpointConfig()  # when checkpoints are written and kept


class BackendConfig(Settings):
    """Which machinery runs the same training (sharding/backend.py)."""

    kind: Literal["auto", "single", "torch", "deepspeed", "xla"] = "single"  # --backend has short names; auto = chosen for the machine
    prefer: Literal["ddp", "fsdp", "zero0", "zero1", "zero2", "zero3", "xla"] | None = None  # auto takes it where it fits
    strategy: Literal["ddp", "fsdp"] = "ddp"  # of torch
    static_graph: bool = False  # ddp: every step uses the same parameters in the same way, so their order is learned once
    zero_stage: Annotated[Literal[0, 1, 2, 3], Digits] = 2  # of deepspeed
    offload: bool = False  # optimizer and, in ZeRO-3, parameters on the CPU
    deepspeed_config: str | None = None  # a user's DeepSpeed file; "auto" is filled in
    processes: int | None = Field(None, ge=1)  # on each machine, one a device; None = chosen for the machine
    nodes: int | None = Field(None, ge=1)  # machines; None = chosen
    xla_devices: int | None = Field(None, gt=0)  # of all hosts of the mesh; None = 1. Virtual ones of the CPU, unless PJRT_DEVICE says TPU
    fsdp_axis: int | None = Field(None, gt=0)  # xla mesh is (data, fsdp) with this fsdp size; None = all devices

    @property
    def world(self) -> int:
        """Processes of all machines."""
        return (self.processes or 1) * (self.nodes or 1)


class Chosen(Settings):
    """One decision of `mmkit.launch.choose`."""

    setting: str  # its full name
    asked: Free  # the value before, which config.yaml keeps
    value: Free  # the value on the machine
    why: str  # in one line


class EvalConfig(Settings):
    """What is scored, on how many documents."""

    tasks: tuple[str, ...] = ()  # see `mmkit list tasks`
    limit: int | None = Field(None, gt=0)  # documents of each task; None = all
    batch: int = Field(16, gt=0)  # documents at a time on one device
    max_new_tokens: int | None = Field(None, gt=0)  # of one answer; None = each task's own, as its original


class RunConfig(Settings):
    """Everything one run needs."""

    preset: str  # the model's file of params/
    stage: Stage  # what is done with it
    name: str = "default"  # of this run among those of its preset and stage
    root: str = "runs"  # folder or URL of all runs
    seed: int = Field(0, ge=0, lt=2**63)  # of weights, order and augmentation
    dry_run: bool = False  # build and check everything, train nothing
    resume: str = "auto"  # auto, never, a checkpoint's path, or step-N, epoch-N: this run's checkpoint there or the last before
    start_from: str | None = None  # run folder or export to start weights from; None = the stage before, where there is one
    model: ModelConfig  # what is trained
    data: DataConfig = DataConfig()  # what it is trained on
    train: TrainConfig = TrainConfig()  # how
    backend: BackendConfig = BackendConfig()  # on what machinery
    evaluation: EvalConfig = EvalConfig()  # what is scored
    intended_for: str = "one CPU"  # the accelerators the published run used, for messages
    pinned: tuple[str, ...] = ()  # settings that are not chosen for a machine; those given by name are added
    chosen: tuple[Chosen, ...] = ()  # what was chosen for a machine, and why

    @property
    def folder(self) -> str:
        """The run folder, ``root/preset/stage/name``; may be a gs:// or s3:// path."""
        return f"{self.root.rstrip('/')}/{self.preset}/{self.stage}/{self.name}"

    @property
    def accumulation(self) -> int:
        """Micro-batches of one step; error where the three numbers do not fit."""
        batch, one_pass = self.train.global_batch, self.train.device_batch * self.devices
        if batch % one_pass:
            lower, own = max(batch // one_pass, 1) * one_pass, self.train.device_batch
            tried = range(1, min(batch, MOST_TRIED) + 1)
            fits = sorted((n for n in tried if batch % (n * self.devices) == 0), key=lambda n: abs(n - own))[:2]
            told = f"device_batch {own} x {self.devices} devices = {one_pass}; use {lower} or {lower + one_pass}"
            raise ConfigError(f"global_batch {batch} does not divide by {told}{''.join(f', or device_batch {n}' for n in fits)}")
        return batch // one_pass

    @property
    def devices(self) -> int:
        """Devices that share one step. Those of xla are known by name only: a config says the same on every machine."""
        assert self.backend.kind != "auto", "backend auto has no devices until `mmkit.launch.choose` has chosen them for a machine"
        return (self.backend.xla_devices or 1) if self.backend.kind == "xla" else self.backend.world

    @property
    def resolved(self) -> bool:
        """Whether nothing is left to be chosen for a machine."""
        kind, spread = self.backend.kind, self.backend.processes is not None
        return kind in ("single", "xla") or (kind != "auto" and (spread or bool(self.chosen)))


# ---------------------------------------------------------------- text -> RunConfig, in this one place

STAGES: tuple[str, ...] = typing.get_args(Stage)
SHOWN = 10  # faults of one config that a message names


def load(model: str = "tiny", stage: str = "pretrain", overrides: dict[str, Any] | None = None, source: str = "overrides") -> RunConfig:
    """The run of preset ``model`` at ``stage``; ConfigError for what is unknown, wrong, read by nothing or does not fit together.

    ``overrides`` maps a dotted path (``train.optimizer.lr``) or its unique last name to a value or text; ``source`` is their origin.
    """
    if str(stage) not in STAGES:
        raise ConfigError(f"no stage {shortened(stage)}{nearest(stage, STAGES)}; stages are {', '.join(STAGES)}")
    tree = preset_tree(str(model))
    stages = tree.pop("stages", None) or {}
    if not isinstance(stages, dict) or any(section is not None and not isinstance(section, dict) for section in stages.values()):
        raise ConfigError(f"{origin(str(model))}: stages = {shortened(stages)}: a mapping is wanted, as {{finetune: {{train: {{...}}}}}}")
    if unknown := [name for name in stages if name not in STAGES]:
        raise ConfigError(f"{origin(str(model))}: no stage {shortened(unknown[0])}{nearest(unknown[0], STAGES)}")
    _check_sections(tree, origin(str(model)))
    tree = merge(tree, stages.get(stage) or {}, origin(str(model))) | {"preset": str(model), "stage": stage}
    paths = [_assign(tree, name, value, source) for name, value in (overrides or {}).items()]
    run = _validate(tree, origin(str(model)) + (f" with {source}" if overrides else ""), paths)
    rules.check_read(run, paths, source)
    return run


def _check_sections(tree: dict[str, Any], source: str, above: tuple[str, ...] = ()) -> None:
    """ConfigError where a section that may not be left out is no mapping: ``train:`` with all its lines commented out is null, and would
    hide what the base says without a word once a stage lays its own settings over it."""
    for key, value in tree.items():
        kinds = kinds_at(RunConfig, (*above, key))
        if kinds and all(isinstance(kind, type) and issubclass(kind, Settings) for kind in kinds):
            if not isinstance(value, dict):
                wanted = f"a mapping of settings is wanted, as {example(kinds)}; leave it out to keep what it is based on"
                raise ConfigError(f"{'.'.join((*above, key))} = {shortened(value)} (from {source}): {wanted}")
            _check_sections(value, source, (*above, key))


def load_file(path: str | Path) -> RunConfig:
    """The resolved config that an earlier run saved (``config.yaml`` of its folder)."""
    return _validate(read_mapping(Path(path)), str(path))


def to_yaml(run: RunConfig) -> str:
    """The resolved config as YAML text that `load_file` reads back unchanged."""
    return yaml.safe_dump(run.model_dump(mode="json"), sort_keys=False)


def changed(run: RunConfig, source: str = "", /, **values: Any) -> RunConfig:
    """A new, checked RunConfig with some settings replaced (dots written as double underscores).

    ``source`` is where a user gave them; a setting that the run does not read is then refused, as by `load`.
    """
    tree, told = run.model_dump(mode="json"), source or "code"
    paths = [_assign(tree, name.replace("__", "."), value, told) for name, value in values.items()]
    new = _validate(tree, told, paths)
    if source:
        rules.check_read(new, paths, source)
    return new


def asked(run: RunConfig) -> RunConfig:
    """The run as it was asked for, before `mmkit.launch.choose` resolved it for a machine."""
    tree = run.model_dump(mode="json")
    for row in tree.pop("chosen"):
        _assign(tree, row["setting"], row["asked"], "code")
    return _validate(tree, "code")


def setting_path(name: str, source: str = "overrides") -> tuple[str, ...]:
    """The full path of a setting given by its path or by its unique last name; ConfigError otherwise.

    What lies inside a free mapping may be named too: ``train.optimizer.lr_of.text``, ``lr_of.text``.
    """
    name, known = str(name), names_of(RunConfig)
    inside = [path for path, kind in known.items() if any(typing.get_origin(each) is dict for each in kinds_of(kind))]
    if name in known or any(name.startswith(path + ".") for path in inside):
        return tuple(name.split("."))
    hits = [path for path in known if path.endswith("." + name)]
    last = {path: path.rpartition(".")[2] for path in inside}
    hits = hits or [path + name[len(last[path]) :] for path in inside if name.startswith(last[path] + ".")]
    if len(hits) == 1:
        return tuple(hits[0].split("."))
    if hits:
        raise ConfigError(f"setting {name!r} from {source} is ambiguous: say {' or '.join(hits)}")
    lists = [(path, kind) for path, kind in known.items() for each in listed(kind) if name in each.model_fields]
    for path, kind in lists:
        raise ConfigError(f"no setting {name!r} (from {source}); entries of {path} have it: give the whole list, as {example(kinds_of(kind))}")
    raise ConfigError(f"no setting {name!r} (from {source}){hint(name, {path.rpartition('.')[2] for path in known} | set(known))}")


def _assign(tree: dict, name: str, value: Any, source: str) -> tuple[str, ...]:
    """Puts a value, or text as the setting's type reads it, at the setting's path, which is returned."""
    path = setting_path(name, source)
    for place, key in enumerate(path[:-1], 1):
        if not isinstance(inside := tree.get(key) or {}, dict):
            raise ConfigError(f"{name} (from {source}): {'.'.join(path[:place])} is {shortened(inside)}, which holds no settings")
        tree[key] = tree = dict(inside)
    tree[path[-1]] = parsed(value, kinds_at(RunConfig, path), f"{name} (from {source})")
    return path


def _validate(tree: dict[str, Any], source: str, given: Iterable[tuple[str, ...]] = ()) -> RunConfig:
    """The run of a tree. Settings ``given`` by name are final: none is chosen for a machine, and none is put back by `asked`."""
    try:
        run = TypeAdapter(RunConfig).validate_python(tree)
    except ValidationError as error:
        problems = error.errors()
        more = [f"and {len(problems) - SHOWN} more"] if len(problems) > SHOWN else []
        raise ConfigError("\n".join([_explain(problem, source) for problem in problems[:SHOWN]] + more)) from None
    own = [name for name in rules.CHOOSABLE if any(f"{name}.".startswith(f"{'.'.join(path)}.") for path in given)]
    chosen = tuple(row for row in run.chosen if row.setting not in own)
    run = run.model_copy(update={"pinned": tuple(sorted({*run.pinned, *own})), "chosen": chosen})
    rules.check(run, source)
    return run


def _explain(problem: dict, source: str) -> str:
    loc = [part for part in problem["loc"] if part not in ("vlm", "clip", "[key]")]
    path, name = shortened(".".join(map(str, loc)), quoted=False), str(loc[-1]) if loc else ""
    if problem["type"] == "extra_forbidden":
        section = [field for kind in kinds_at(RunConfig, loc[:-1]) if hasattr(kind, "model_fields") for field in kind.model_fields]
        return f"no setting {path!r} (from {source}){hint(name, section if section else names_of(RunConfig))}"
    shown = "" if isinstance(problem["input"], dict) else f" = {shortened(problem['input'])}"
    return f"{path or 'run'}{shown} (from {source}): {explain(problem, kinds_at(RunConfig, loc), name)}"
