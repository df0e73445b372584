"""One process: names, placement, precision, skips, scaler, state; what the sharded kinds inherit."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from mmkit.config import BackendConfig, ConfigError, TrainConfig
from mmkit.sharding import backend as seam
from mmkit.sharding import moments
from mmkit.sharding.backend import create, plain_name


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.calls = 0

    def forward(self, x, *, scale=1.0):
        self.calls += 1
        return x + scale * torch.tanh(self.linear(x))


class Model(nn.Module):
    """Tied weights, a persistent and a non-persistent buffer, a frozen part."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(6, 4)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.embed.weight
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.register_buffer("kept", torch.ones(2))
        self.register_buffer("dropped", torch.ones(2), persistent=False)


class Objective(nn.Module):
    def __init__(self, model=None):
        super().__init__()
        self.model = model or Model()

    def forward(self, ids):
        x = self.model.frozen(self.model.embed(ids))
        for block in self.model.blocks:
            x = block(x, scale=0.5)
        logits = self.model.head(x)
        self.dtype = logits.dtype
        return (logits.float().logsumexp(-1).sum() - logits.float()[..., 0].sum()) / 64  # fp16 gradients fit under the first scale


IDS = torch.tensor([[0, 1, 2], [3, 4, 5]])


def prepared(precision="fp32", objective=None, factory=None, **train):
    torch.manual_seed(0)
    backend = create(BackendConfig(), precision)
    objective = objective or Objective()
    factory = factory or (lambda named: torch.optim.AdamW(named.values(), lr=1e-2))
    model = backend.prepare(objective, factory, train=TrainConfig(precision=precision, **train), blocks=("Block",))
    return backend, model


def step(backend, model, factor=1.0, max_norm=1.0):
    backend.backward(model(IDS) * factor, last=True)
    return float(backend.update(max_norm))


def snapshot(backend):
    return {f"{name} {key}": t for name, entry in backend.export_state() for key, t in entry.items()}


def test_names_are_plain_and_the_factory_gets_only_trained_parameters():
    seen = {}

    def factory(named):
        seen.update(named)
        return torch.optim.AdamW(named.values())

    backend, _ = prepared(factory=factory)
    assert list(seen) == ["embed.weight", *(f"blocks.{i}.linear.{key}" for i in (0, 1) for key in ("weight", "bias"))]
    assert list(dict(backend.full_parameters())) == [*list(seen)[:5], "frozen.weight", "frozen.bias", "kept"]


@pytest.mark.parametrize("wrappers", ["module.", "_orig_mod.module.", "module._orig_mod.", ""])
def test_wrapper_names_are_stripped_in_any_order(wrappers):
    assert plain_name(f"{wrappers}model.x.weight", "model.") == "x.weight"
    assert plain_name("model.x._checkpoint_wrapped_module.y", "model.") == "x.y"


DTYPES = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@pytest.mark.parametrize(("precision", "dtype"), DTYPES.items())
def test_precision_is_autocast_over_fp32_weights(precision, dtype):
    backend, model = prepared(precision)
    for _ in range(2):
        step(backend, model)
    assert model.dtype == dtype
    assert all(p.dtype == torch.float32 for p in backend.parameters().values())
    assert all(t.dtype == torch.float32 for t in snapshot(backend).values())
    assert (backend.scaler is not None) == (precision == "fp16")
    assert torch.get_float32_matmul_precision() == ("high" if precision == "tf32" else "highest")


def test_half_precision_trained_weights_are_refused():
    with pytest.raises(ConfigError, match="blocks.0.linear.weight is torch.bfloat16.*kept in fp32"):
        objective = Objective()
        objective.model.blocks[0].to(torch.bfloat16)
        prepared("bf16", objective)


def test_returned_norm_is_before_clipping_and_clipping_scales_the_step():
    free, clipped = prepared(), prepared()
    assert step(*free, max_norm=None) == pytest.approx(step(*clipped, max_norm=1e-3))
    moment = {name: snapshot(backend)[name] for backend in (free[0], clipped[0]) for name in ["embed.weight exp_avg"]}
    norm = math.sqrt(sum(float(t.square().sum()) for name, t in snapshot(clipped[0]).items() if name.endswith("exp_avg")))
    assert moment and norm == pytest.approx(0.1 * 1e-3, rel=1e-3)  # (1 - beta1) x clipped gradient


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_non_finite_gradients_leave_weights_moments_and_step_untouched(precision, bad):
    backend, model = prepared(precision)
    step(backend, model)
    before = snapshot(backend)
    for count in (1, 2, 3, 4, 5):
        step(backend, model, bad)
        assert bool(backend.skipped) and int(backend.n_skipped) == count
    assert all(torch.equal(t, before[name]) for name, t in snapshot(backend).items())
    assert backend.extra_state()["optimizer_step"] == 1 and backend.extra_state()["n_skipped"] == 5
    step(backend, model)
    assert not bool(backend.skipped) and backend.extra_state()["optimizer_step"] == 2


def test_a_run_overflowing_in_fp16_goes_on_in_fp32_with_the_same_moments():
    backend, model = prepared("fp16")
    step(backend, model)
    step(backend, model, float("inf"))
    saved, extra = dict(backend.export_state()), backend.extra_state()
    assert extra["scaler"] == {"scale": 2.0**15, "good_steps": 0}
    other, again = prepared("fp32")
    other.import_state(saved.__getitem__, extra["optimizer_step"])
    other.load_extra_state(extra)
    assert all(torch.equal(t, saved[name.rsplit(" ", 1)[0]][name.rsplit(" ", 1)[1]]) for name, t in snapshot(other).items())
    assert float(again(IDS).detach()) == pytest.approx(float(model(IDS).detach()), rel=1e-2)
    assert int(other.n_skipped) == 1 and "scaler" not in other.extra_state()
    half, _ = prepared("fp16")
    half.load_extra_state(extra)
    assert half.extra_state()["scaler"] == extra["scaler"]


def test_resumed_steps_are_bit_identical_to_unbroken_ones():
    backend, model = prepared()
    for _ in range(2):
        step(backend, model)
    saved, extra = dict(backend.export_state()), backend.extra_state()
    unbroken = [step(backend, model) for _ in range(3)]
    other, again = prepared()
    other.import_state(saved.__getitem__, extra["optimizer_step"])
    assert [step(other, again) for _ in range(3)] == unbroken
    assert all(torch.equal(t, snapshot(other)[name]) for name, t in snapshot(backend).items())


def test_exported_tensors_do_not_change_with_later_steps():
    backend, model = prepared()
    step(backend, model)
    saved = snapshot(backend)
    copies = {name: t.clone() for name, t in saved.items()}
    step(backend, model)
    assert all(torch.equal(saved[name], t) for name, t in copies.items())
    assert any(not torch.equal(saved[name], t) for name, t in snapshot(backend).items())


def test_a_state_of_another_shape_is_refused_by_name():
    backend, model = prepared()
    step(backend, model)
    saved = dict(backend.export_state())
    saved["embed.weight"]["exp_avg"] = torch.zeros(5, 4)
    with pytest.raises(ValueError, match=r"saved exp_avg of embed.weight has shape \(5, 4\), the model's is \(6, 4\)"):
        backend.import_state(saved.__getitem__, 1)


def test_a_state_can_be_saved_before_the_first_step():
    backend, _ = prepared()
    assert all(not t.any() for name, t in snapshot(backend).items() if "exp_avg" in name)
    assert backend.extra_state()["optimizer_step"] == 0


def test_freezing_or_unfreezing_after_prepare_is_an_error():
    backend, model = prepared()
    model.model.frozen.weight.requires_grad_(True)
    with pytest.raises(ValueError, match="requires_grad of frozen.weight became True after prepare"):
        step(backend, model)
    backend, model = prepared()
    model.model.blocks[1].linear.bias.requires_grad_(False)
    with pytest.raises(ValueError, match="requires_grad of blocks.1.linear.bias became False after prepare"):
        step(backend, model)


def test_blocks_are_run_again_in_backward_only_when_asked_and_frozen_inputs_do_not_cut_gradients():
    for asked in (False, True):
        objective = Objective()
        objective.model.embed.weight.requires_grad_(False)
        backend, model = prepared(objective=objective, checkpoint_blocks=asked)
        step(backend, model)
        assert [block.calls for block in model.model.blocks] == [2 if asked else 1] * 2
        assert backend.reached and all(backend.reached.values())


def test_a_parameter_without_gradient_is_reported():
    objective = Objective()
    objective.model.unused = nn.Linear(2, 2, bias=False)
    backend, model = prepared(objective=objective)
    assert backend.reached is None
    step(backend, model)
    assert [name for name, hit in backend.reached.items() if not hit] == ["unused.weight"]


def test_meta_models_are_filled_one_tensor_at_a_time_and_tied_weights_stay_tied():
    source = Objective()
    named = {plain_name(name, "model."): t for name, t in [*source.named_parameters(), *source.named_buffers()]}
    with torch.device("meta"):
        empty = Objective()
    backend = create(BackendConfig(), "fp32")
    asked = []
    train = TrainConfig(precision="fp32")
    model = backend.prepare(empty, None, train=train, weights=lambda name: asked.append(name) or named[name].detach())
    assert model.model.head.weight is model.model.embed.weight
    assert asked.count("embed.weight") == 1 and "head.weight" not in asked and set(asked) == set(named)
    assert float(model(IDS).detach()) == float(source(IDS).detach())
    with torch.device("meta"):
        empty = Objective()
    with pytest.raises(ConfigError, match="is on the meta device; give prepare"):
        create(BackendConfig(), "fp32").prepare(empty, None, train=train)
    with pytest.raises(ConfigError, match=r"weight \w+ has shape \(1,\)"):
        create(BackendConfig(), "fp32").prepare(empty, None, train=train, weights=lambda name: torch.zeros(1))


def test_clear_gives_back_the_plain_module():
    backend, model = prepared("bf16", checkpoint_blocks=True)
    step(backend, model)
    plain = backend.plain
    backend.clear()
    plain(IDS)
    assert plain.dtype == torch.float32 and "forward" not in plain.__dict__ and "forward" not in plain.model.blocks[0].__dict__


def test_one_process_talks_to_itself():
    backend, _ = prepared()
    x = torch.ones(2, requires_grad=True)
    assert backend.gather(x, with_grad=True) is x and not backend.gather(x).requires_grad and backend.rotate(x) is x
    assert float(backend.sum_over_devices(3)) == 3 and backend.any_device(torch.tensor(True)) and backend.all_objects(1) == [1]
    assert backend.broadcast("a") == "a" and backend.is_main and backend.barrier() is None and backend.compiles() == 0
    state = backend.rng_state()
    drawn = torch.rand(3)
    backend.set_rng_state(state)
    assert torch.equal(torch.rand(3), drawn)


def test_unknown_backends_are_refused_with_the_nearest_name():
    with pytest.raises(ConfigError, match="no backend 'torhc'; did you mean 'torch'"):
        create(BackendConfig.model_construct(kind="torhc"), "fp32")
    assert set(seam.BACKENDS) == {"single", "torch", "deepspeed", "xla"}


def test_eight_bit_moments_survive_a_round_trip_code_for_code():
    bitsandbytes = pytest.importorskip("bitsandbytes")
    torch.manual_seed(0)
    layer = nn.Linear(128, 64)

    def made():
        return bitsandbytes.optim.AdamW8bit(layer.parameters(), lr=1e-3, min_8bit_size=4096)

    optimizer = made()
    for _ in range(3):
        layer(torch.randn(8, 128)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert optimizer.state[layer.weight]["state1"].dtype == torch.uint8
    other = made()
    for p in layer.parameters():
        moments.write(other, p, {m: moments.read(optimizer, p, m).clone() for m in seam.MOMENTS}, moments.count(optimizer))
        for key, value in optimizer.state[p].items():
            same = other.state[p][key]
            if torch.is_tensor(value) and value.is_floating_point():
                assert torch.allclose(same, value, rtol=1e-6, atol=0), key
            else:
                assert torch.equal(same, value) if torch.is_tensor(value) else same == value, key
    assert moments.count(other) == 3
