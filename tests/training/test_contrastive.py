"""Contrastive losses: equal to open_clip's on one process, and on many processes equal to one process with the joined batch."""

import json
import math

import pytest
import torch
import torch.nn.functional as F
from open_clip.loss import ClipLoss, CoCaLoss, DistillClipLoss, SigLipLoss

from mmkit.config import BackendConfig, ClipConfig, ConfigError, ContrastiveConfig
from mmkit.models.clip import ClipModel
from mmkit.sharding.backend import Backend, create
from mmkit.training.accumulate import contrastive_step, frozen_statistics
from mmkit.training.contrastive import (
    ContrastiveLoss,
    ContrastiveObjective,
    advice,
    caption_hash,
    check,
    is_unmasked,
    repeated_share,
    unmask_when_due,
)
from tests.training.contrastive_cases import N, PARTIAL, Toy, joined_batch, model_of, teacher_of
from tests.training.processes import run_processes

SPLIT = {
    "cached": {"contrastive": {}, "micro": 2},
    "cached in 3": {"contrastive": {}, "micro": 3},
    "cached siglip": {"contrastive": {"kind": "siglip", "siglip_exchange": "shift"}, "micro": 2},
    "cached coca": {"contrastive": {"kind": "coca"}, "micro": 2},
    "cached distill": {"contrastive": {"kind": "distill", "chunk": 7}, "micro": 3},
}
DRAWN = {
    f"{name} in {micro}": {"contrastive": {}, "micro": micro, name: share}
    for name, share in (("dropout", 0.4), ("patch_dropout", 0.5))
    for micro in (2, 3)
}
SIGLIP = {f"siglip {way}": {"contrastive": {"kind": "siglip", "siglip_exchange": way}} for way in ("bidir", "shift", "gather", "reduce")}
EXACT = {
    **SIGLIP,
    "local": {"contrastive": {}},
    "global": {"contrastive": {"local_loss": False}},
    "chunked": {"contrastive": {"chunk": 7}},
    "siglip chunked": {"contrastive": {"kind": "siglip", "chunk": 5}},
    "coca": {"contrastive": {"kind": "coca"}},
    "distill": {"contrastive": {"kind": "distill"}},
    "distill chunked": {"contrastive": {"kind": "distill", "chunk": 7}},
    **SPLIT,
}
WRONG = {
    "global without gradient": {"contrastive": {"local_loss": False, "gather_with_grad": False}, "unchecked": True},
    "local without gradient": {"contrastive": {"gather_with_grad": False}, "unchecked": True},
}


class Alone:
    """The gather seam of one process."""

    rank, world = 0, 1

    def gather(self, x, with_grad=False):
        return x


def open_clips_loss(config, n=N):
    """Loss and gradients of one process that holds all pairs, or the first ``n``, by open_clip's classes."""
    model, teacher, batch = model_of(config), teacher_of(config), {name: value[:n] for name, value in joined_batch().items()}
    out = model(batch)
    image, text, scale = out["image_features"], out["text_features"], out["logit_scale"]
    if config.kind == "siglip":
        loss = SigLipLoss()(image, text, scale, out["logit_bias"])
    elif config.kind == "coca":
        loss = sum(CoCaLoss(2.0, 1.0)(image, text, out["logits"], out["labels"], scale))
    elif config.kind == "distill":
        taught = teacher(batch)
        loss = sum(DistillClipLoss()(image, text, scale, taught["image_features"], taught["text_features"], taught["logit_scale"]))
    else:
        loss = ClipLoss()(image, text, scale)
    loss.backward()
    return loss.item(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def likeness(gradients, wanted):
    """(norm ratio, cosine) over all weights but the temperature and bias."""
    names = [name for name in wanted if not name.startswith("logit_")]
    a, b = (torch.cat([source[name].flatten().double() for name in names]) for source in (gradients, wanted))
    return float(a.norm() / b.norm()), float(F.cosine_similarity(a, b, dim=0))


def run_cases(tmp_path_factory, kind, cases, world=1, strategy="ddp", stage=0, xla_devices=None):
    out = tmp_path_factory.mktemp("cases") / "out.pt"
    run_processes("contrastive_cases.py", [out, kind, strategy, stage, json.dumps(cases)], world, xla_devices)
    return torch.load(out)


@pytest.fixture(scope="module", params=[2, 4])
def ddp(request, tmp_path_factory):
    return request.param, run_cases(tmp_path_factory, "torch", EXACT | DRAWN | WRONG, world=request.param)


def assert_equal_to_one_process(results):
    """Every exact case equals open_clip's loss of one process; every case with random draws equals one graph with the same draws."""
    for name in EXACT:
        loss, wanted = open_clips_loss(ContrastiveConfig(**EXACT[name]["contrastive"]))
        assert results[name]["loss"] == pytest.approx(loss, rel=1e-5), name
        partial, _ = open_clips_loss(ContrastiveConfig(**EXACT[name]["contrastive"]), PARTIAL)
        assert results[name]["validation"] == pytest.approx((N * loss + PARTIAL * partial) / (N + PARTIAL), rel=1e-5), name
        assert_same_gradients(results[name]["gradients"], wanted, name)
    for name in DRAWN:
        found = results[name]
        wanted = {key: found["one_graph"][key.removeprefix("model.")] for key in found["gradients"]}
        assert_same_gradients(found["gradients"], wanted, name)


def assert_same_gradients(gradients, wanted, name):
    ratio, cosine = likeness(gradients, wanted)
    assert ratio == pytest.approx(1, abs=1e-4) and cosine == pytest.approx(1, abs=1e-6), (name, ratio, cosine)
    for scalar in [key for key in wanted if key.startswith("logit_")]:
        assert gradients[scalar].item() == pytest.approx(wanted[scalar].item(), rel=1e-4), (name, scalar)


def test_gradients_on_many_processes_equal_one_process_on_the_joined_batch(ddp):
    world, results = ddp
    assert_equal_to_one_process(results)
    assert results["local"]["duplicate_share"] == pytest.approx(2 / N)


def test_what_the_refused_combinations_would_do(ddp):
    world, results = ddp
    _, wanted = open_clips_loss(ContrastiveConfig())
    ratio, cosine = likeness(results["global without gradient"]["gradients"], wanted)
    assert ratio == pytest.approx(1 / world, rel=1e-4) and cosine == pytest.approx(1, abs=1e-6)
    _, cosine = likeness(results["local without gradient"]["gradients"], wanted)
    assert cosine < 0.99
    for name in WRONG:
        assert results[name]["gradients"]["logit_scale"].item() == pytest.approx(wanted["logit_scale"].item(), rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("kind, strategy, stage", [("torch", "fsdp", 0), ("deepspeed", "ddp", 3)])
def test_sharded_backends_give_the_same_gradients(tmp_path_factory, kind, strategy, stage):
    assert_equal_to_one_process(run_cases(tmp_path_factory, kind, EXACT | DRAWN, 2, strategy, stage))


@pytest.mark.slow
def test_one_program_over_four_xla_devices_gives_the_same_gradients(tmp_path_factory):
    """The program sees the global batch, so the ways of exchange have nothing to exchange: they are one program, compiled once."""
    results = run_cases(tmp_path_factory, "xla", EXACT | DRAWN, xla_devices=4)
    assert_equal_to_one_process(results)
    assert len({results[name]["compiles"] for name in SIGLIP}) == 1
    assert results["global"]["compiles"] == results["local"]["compiles"]


@pytest.mark.parametrize("local", [True, False])
def test_gathering_without_gradient_is_refused_with_the_reason(local):
    with pytest.raises(ConfigError, match="gather_with_grad=true"):
        check(ContrastiveConfig(local_loss=local, gather_with_grad=False))
    with pytest.raises(ConfigError, match="wrong direction" if local else "number of devices"):
        ContrastiveLoss(ContrastiveConfig(local_loss=local, gather_with_grad=False), Alone())


@pytest.mark.parametrize("kind", ["clip", "siglip", "coca", "distill"])
@pytest.mark.parametrize("chunk", [0, 1, 5, N, 40])
def test_any_chunk_gives_open_clips_loss_and_gradients(kind, chunk):
    config = ContrastiveConfig(kind=kind, chunk=chunk)
    model = model_of(config)
    objective = ContrastiveObjective(model, Alone(), config, teacher_of(config))
    out = objective(joined_batch())
    (out["loss_sum"] / N).backward()
    loss, wanted = open_clips_loss(config)
    assert out["loss_sum"].item() / N == pytest.approx(loss, rel=1e-5)
    for name, p in model.named_parameters():
        if name in wanted:
            assert torch.allclose(p.grad, wanted[name], rtol=1e-3, atol=1e-6), name


def test_chunks_bound_the_memory_of_the_similarity():
    """The largest tensor kept for backward or made in it has b x chunk elements, not b x N."""
    b, n, chunk = 32, 512, 16
    sizes = []

    class Sizes(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            out = function(*args, **(kwargs or {}))
            sizes.extend(x.numel() for x in (out if isinstance(out, (tuple, list)) else [out]) if isinstance(x, torch.Tensor))
            return out

    class Others(Alone):
        def gather(self, x, with_grad=False):
            return torch.cat([x, others[: n - b]]) if x.dim() > 1 else x

    others = F.normalize(torch.randn(n, 4), dim=-1)
    image, text = (F.normalize(torch.randn(b, 4), dim=-1).requires_grad_() for _ in range(2))
    loss = ContrastiveLoss(ContrastiveConfig(chunk=chunk), Others())
    with Sizes():
        out = loss({"image_features": image, "text_features": text, "logit_scale": torch.tensor(10.0)})
        out["loss_sum"].backward()
    assert max(sizes) <= max(n * 4, b * chunk) < b * n


def test_logits_are_float32_under_autocast_and_half_precision_on_request():
    model = Toy()
    batch = joined_batch()
    exact = ContrastiveObjective(model, Alone(), ContrastiveConfig())
    as_upstream = ContrastiveObjective(model, Alone(), ContrastiveConfig(logits_fp32=False))
    features = exact(batch, mode="features")
    with torch.autocast("cpu", torch.bfloat16):
        one, other = (objective.loss(features)["loss_sum"].item() for objective in (exact, as_upstream))
    assert one == exact.loss(features)["loss_sum"].item()
    assert one != other and one == pytest.approx(other, rel=0.02)


@pytest.fixture
def single():
    backend = create(BackendConfig(), "fp32")
    yield backend
    backend.close()


@pytest.mark.parametrize("k", [2, 4])
@pytest.mark.parametrize("kind", ["clip", "siglip"])
def test_accumulation_equals_the_big_batch_with_dropout_and_the_temperature_exact(single, k, kind):
    """Both passes must draw the same dropout; with other draws the gradients differ by far more than the tolerance."""
    config = ContrastiveConfig(kind=kind)
    parts = [{name: value.chunk(k)[i] for name, value in joined_batch().items()} for i in range(k)]

    def prepared():
        model = model_of(config, dropout=0.4)
        objective = ContrastiveObjective(model, single, config)
        return model, objective, single.prepare(objective, lambda named: torch.optim.SGD(named.values(), lr=0.0), train=_train())

    model, objective, wrapped = prepared()
    torch.manual_seed(3)
    halves = [objective(part, mode="features") for part in parts]
    features = halves[0] | {name: torch.cat([half[name] for half in halves]) for name in ("image_features", "text_features")}
    (objective.loss(features)["loss_sum"] / N).backward()
    wanted = {name: p.grad.clone() for name, p in model.named_parameters()}
    after = torch.rand(1)

    model, objective, wrapped = prepared()
    torch.manual_seed(3)
    out = contrastive_step(wrapped, objective.loss, parts, single, N)
    assert out["n_targets"] == N and not out["loss_sum"].requires_grad
    for name, p in model.named_parameters():
        assert torch.allclose(p.grad, wanted[name], atol=1e-6), name
    assert torch.rand(1) == after, "the random stream goes on as if there had been one pass"


def _train():
    from mmkit.config import TrainConfig

    return TrainConfig(precision="fp32")


def test_the_first_pass_leaves_running_statistics_alone():
    norm = torch.nn.BatchNorm1d(3)
    before = {name: value.clone() for name, value in norm.state_dict().items()}
    with frozen_statistics(norm):
        norm(torch.randn(8, 3))
    assert all(torch.equal(value, before[name]) for name, value in norm.state_dict().items())
    norm(torch.randn(8, 3))
    assert norm.num_batches_tracked == 1 and not torch.equal(norm.running_mean, before["running_mean"])


def test_duplicate_captions_are_counted_and_warned_of():
    text = torch.arange(32).view(8, 4)
    text[:4] = text[0]
    share = repeated_share(caption_hash(text)).item()
    assert share == 0.5 and "50% of the batch's captions" in advice({"step": 3, "duplicate_share": share})
    assert advice({"step": 3, "duplicate_share": 0.1}) == advice({"step": 3}) == ""
    features = torch.randn(8, 6)
    features[5] = features[2]
    assert repeated_share(caption_hash(features)).item() == 0.25
    assert repeated_share(caption_hash(torch.tensor([[1, 2], [2, 1], [3, 0]]))).item() == 0


def test_random_features_have_no_gap_to_the_logarithm_of_the_batch():
    image, text = (F.normalize(torch.randn(512, 256, generator=torch.Generator().manual_seed(i)), dim=-1) for i in range(2))
    out = ContrastiveLoss(ContrastiveConfig(), Alone())({"image_features": image, "text_features": text, "logit_scale": torch.tensor(1.0)})
    assert out["loss_gap"].item() == pytest.approx(0, abs=0.02)
    assert out["loss_gap"].item() == pytest.approx(out["loss_sum"].item() / 512 - math.log(512), abs=1e-5)


def test_a_spiking_step_of_cached_accumulation_is_left_out(single):
    objective = ContrastiveObjective(Toy(), single, ContrastiveConfig())
    wrapped = single.prepare(objective, lambda named: torch.optim.AdamW(named.values(), lr=0.1), train=_train())
    parts = [{name: value.chunk(2)[i] for name, value in joined_batch().items()} for i in range(2)]
    before = [p.clone() for p in objective.parameters()]
    for limit, moved in ((0.1, False), (100.0, True)):
        contrastive_step(wrapped, objective.loss, parts, single, N, limit)
        single.update(1.0)
        assert bool(single.skipped) != moved
        assert any(not torch.equal(a, b) for a, b in zip(before, objective.parameters(), strict=True)) == moved


def test_modes_and_what_they_need_are_checked():
    with pytest.raises(ValueError, match="no mode 'lose'"):
        ContrastiveObjective(Toy(), Alone(), ContrastiveConfig())(joined_batch(), mode="lose")
    with pytest.raises(ConfigError, match="distill_from"):
        ContrastiveObjective(Toy(), Alone(), ContrastiveConfig(kind="distill"))
    with pytest.raises(ConfigError, match="init_logit_bias"):
        ContrastiveObjective(Toy(), Alone(), ContrastiveConfig(kind="siglip"))(joined_batch())


def test_a_teacher_is_never_trained_and_stays_in_evaluation_mode():
    objective = ContrastiveObjective(Toy(dropout=0.5), Alone(), ContrastiveConfig(kind="distill"), Toy(dropout=0.5, width=3)).train()
    assert objective.model.training and not objective.teacher.training
    objective(joined_batch())["loss_sum"].backward()
    assert all(p.grad is None for p in objective.teacher.parameters())


def test_the_last_share_of_training_is_unmasked():
    config = ContrastiveConfig(unmasked_last=0.25)
    assert [is_unmasked(step, 8, config) for step in range(8)] == [False] * 6 + [True] * 2
    assert not any(is_unmasked(step, 8, ContrastiveConfig()) for step in range(8))
    vision = {"image_size": 32, "layers": 1, "width": 16, "head_width": 8, "patch_size": 8}
    text = {"context_length": 8, "vocab_size": 50, "width": 16, "heads": 2, "layers": 1}
    architecture = {"embed_dim": 8, "vision_cfg": vision, "text_cfg": text}
    model = ClipModel(ClipConfig(name="small", patch_dropout=0.5, architecture=architecture)).train()
    shares = []
    for step in range(8):
        unmask_when_due(model, step, 8, config)
        shares.append(model.clip.visual.patch_dropout.prob)
    assert shares == [0.5] * 6 + [0.0] * 2


def test_the_gather_seam_is_the_backends():
    assert {"gather", "rng_state", "set_rng_state", "backward"} <= set(dir(Backend))
