"""What tracing finds of a loader: replaying it gives what the loader gives, and what cannot be followed is named."""

from __future__ import annotations

import json

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from wt_worker.placement.plan import Box, Copy, Plan
from wt_worker.placement.trace import Target, TraceError, trace


def run(load, rows, parameters):
    """The plan of `load(parameters, pairs)`, and what loading random values really gives."""
    targets = [Target(name, name.rpartition(".")[0], tensor) for name, tensor in parameters.items()]
    before = {name: tensor.clone() for name, tensor in parameters.items()}
    plan = trace(rows, targets, lambda pairs: load(parameters, pairs))
    assert all(torch.equal(before[name], tensor) for name, tensor in parameters.items())
    generator = torch.Generator().manual_seed(1)
    values = {name: torch.randint(-100, 100, shape, generator=generator).to(dtype) for name, dtype, shape in rows}
    loaded = {name: torch.full_like(tensor, 77) for name, tensor in parameters.items()}
    load(loaded, ((name, value.clone()) for name, value in values.items()))
    return plan, values, loaded


def replay(plan, values, parameters):
    """Copies and constants of `plan`, into new tensors."""
    result = {name: torch.full_like(tensor, 77) for name, tensor in parameters.items()}
    for name in plan.names:
        for copy in name.copies:
            flat = values[name.name].contiguous().reshape(-1)
            target = result[copy.parameter]
            target.as_strided(copy.destination.shape, copy.destination.strides, copy.destination.offset).copy_(
                copy.source.of(flat)
            )
    for fill in plan.fills:
        fill.region.of(result[fill.parameter].reshape(-1)).fill_(fill.value)
    return result


def assert_replays(load, rows, parameters):
    plan, values, loaded = run(load, rows, parameters)
    assert not [name.problem for name in plan.names if name.problem]
    assert not [each.problem for each in plan.parameters if each.problem]
    result = replay(plan, values, parameters)
    for name, tensor in loaded.items():
        assert torch.equal(result[name], tensor), name
    assert Plan.from_dict(json.loads(json.dumps(plan.to_dict()))) == plan
    assert all(problem is None for problem in plan.cover.values())
    return plan


F32 = torch.float32


def fused(parameters, pairs):
    for name, tensor in pairs:
        part = {"q": (0, 8), "k": (8, 4), "v": (12, 4)}[name]
        parameters["qkv"].narrow(0, *part).copy_(tensor)


def test_fused_parameter_has_a_contiguous_copy_for_each_part():
    """Three checkpoint tensors land one behind the other in one parameter."""
    rows = [("q", F32, (8, 6)), ("k", F32, (4, 6)), ("v", F32, (4, 6))]
    plan = assert_replays(fused, rows, {"qkv": torch.zeros(16, 6)})
    assert plan.kind("qkv") == "contiguous"
    assert plan.names[1].copies == (Copy(Box(0, (24,), (1,)), "qkv", Box(48, (24,), (1,))),)


def test_missing_part_shows_in_the_cover():
    """A fused parameter of which one part is not announced is not covered."""
    plan, _, _ = run(fused, [("q", F32, (8, 6)), ("v", F32, (4, 6))], {"qkv": torch.zeros(16, 6)})
    assert plan.cover == {"qkv": "72 of 96 elements are written"}
    assert plan.parameters[0].num_written == 72


def test_row_and_column_shards():
    """Rank 1 of 2: rows are one run, columns a strided box."""

    def load(parameters, pairs):
        for name, tensor in pairs:
            dim = 0 if name == "column" else 1
            size = tensor.shape[dim] // 2
            parameters[name].copy_(tensor.narrow(dim, size, size))

    plan = assert_replays(
        load, [("column", F32, (8, 6)), ("row", F32, (8, 6))], {"column": torch.zeros(4, 6), "row": torch.zeros(8, 3)}
    )
    assert plan.kind("column") == "contiguous"
    assert plan.kind("row") == "strided"
    assert plan.names[1].copies[0].source == Box(3, (8, 3), (6, 1))


def test_square_transposed_weight_is_not_taken_for_a_plain_copy():
    """Same shape on both sides, and yet every element moves."""

    def load(parameters, pairs):
        for _, tensor in pairs:
            parameters["w"].copy_(tensor.t())

    plan = assert_replays(load, [("w", F32, (5, 5))], {"w": torch.zeros(5, 5)})
    assert plan.kind("w") == "strided"


def test_regrouped_heads_are_followed_through_copies():
    """Grouped q, k, v: a view, a split, a reshape that copies, a cat that copies."""

    def load(parameters, pairs):
        for _, tensor in pairs:
            grouped = tensor.view(2, 4, 3, 6)  # groups, heads (2 q, k, v), rows, hidden
            q, k, v = grouped.split([2, 1, 1], dim=1)
            parts = [part.reshape(-1, 6) for part in (q, k, v)]
            parameters["qkv"].copy_(torch.cat(parts).contiguous())

    plan = assert_replays(load, [("qkv", F32, (24, 6))], {"qkv": torch.zeros(24, 6)})
    assert plan.kind("qkv") == "contiguous"
    assert len(plan.names[0].copies) == 6


def test_shard_of_a_permuted_copy():
    """Interleaved halves, made contiguous, then cut."""

    def load(parameters, pairs):
        for _, tensor in pairs:
            moved = tensor.permute(0, 2, 1).contiguous()
            parameters["w"].copy_(moved[:, 2:6, :].transpose(1, 2).clone()[..., ::2])

    assert_replays(load, [("w", F32, (3, 4, 8))], {"w": torch.zeros(3, 4, 2)})


def test_padding_is_a_fill():
    """Rows behind the vocabulary are constants, and count as covered."""

    def load(parameters, pairs):
        for _, tensor in pairs:
            parameters["embed"][:5].copy_(tensor)
            parameters["embed"][5:].fill_(0)

    plan = assert_replays(load, [("embed", F32, (5, 2))], {"embed": torch.zeros(8, 2)})
    assert plan.kind("embed") == "contiguous+filled"


def test_loader_that_writes_zeros_into_its_source():
    """On other ranks than the first, a bias is zeroed and then copied: a constant, and no copy."""

    def load(parameters, pairs):
        for _, tensor in pairs:
            tensor.zero_()
            parameters["bias"].copy_(tensor)

    plan = assert_replays(load, [("bias", F32, (6,))], {"bias": torch.zeros(6)})
    assert plan.names[0].copies == ()
    assert plan.names[0].constants == ("bias",)


def test_cast_is_seen():
    """The parameter's dtype is another."""

    def load(parameters, pairs):
        for _, tensor in pairs:
            parameters["w"].copy_(tensor)

    plan = assert_replays(load, [("w", F32, (4, 4))], {"w": torch.zeros(4, 4, dtype=torch.bfloat16)})
    assert plan.kind("w") == "whole+cast"


def test_copy_by_device_and_wider_dtype_is_followed():
    """`.to(device)` and `.float()` on the way change nothing."""

    def load(parameters, pairs):
        for _, tensor in pairs:
            parameters["w"].copy_(tensor.to("cpu").float())

    plan = assert_replays(load, [("w", torch.bfloat16, (4,))], {"w": torch.zeros(4)})
    assert plan.kind("w") == "whole+cast"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda tensor, _: -tensor.exp(), "aten.exp"),
        (lambda tensor, _: tensor.to(torch.bfloat16).float(), "rounded to torch.bfloat16"),
        (lambda tensor, _: tensor.mul_(2), "aten.mul_"),
        (lambda tensor, _: tensor[:1].expand(4, 4), "one element goes to several places"),
        (lambda tensor, _: tensor.view(torch.int32).view(torch.float32) if tensor.sum().item() else tensor, "aten.sum"),
        (lambda tensor, _: tensor.view(torch.int32), "read as torch.int32"),
        (lambda tensor, _: tensor[[0, 1, 2, 3]], "aten.index"),
        (lambda tensor, _: torch._neg_view(tensor), "a view that changes values"),
    ],
)
def test_what_cannot_be_followed_is_named(change, words):
    """Operation and source line; the copies of such a name are dropped."""

    def load(parameters, pairs):
        for _, tensor in pairs:
            parameters["w"].copy_(change(tensor, parameters["w"]))

    plan, _, _ = run(load, [("w", F32, (4, 4))], {"w": torch.zeros(4, 4)})
    assert words in plan.names[0].problem
    assert plan.names[0].copies == ()
    assert plan.kind("w") in {"loader", "untouched"}
    assert "test_trace.py:" in (plan.names[0].problem + str(plan.parameters[0].problem))


def test_doubt_about_a_name_is_one_about_all_its_places():
    """A loader that copies a tensor and computes with it, too: the layer that it was copied to goes through the loader."""

    def load(parameters, pairs):
        for _, tensor in pairs:
            parameters["w"].copy_(tensor)
            tensor.sum()

    plan, _, _ = run(load, [("w", F32, (4, 4))], {"w": torch.zeros(4, 4)})
    assert "aten.sum" in plan.parameters[0].problem
    assert plan.kind("w") == "loader"


def test_transform_after_the_copy_is_seen():
    """The copy is plain; what the loader then does to the parameter is not."""

    def load(parameters, pairs):
        for _, tensor in pairs:
            parameters["a"].copy_(tensor)
            parameters["a"].copy_(-torch.exp(parameters["a"]))

    plan, _, _ = run(load, [("a", F32, (4,))], {"a": torch.zeros(4)})
    assert "written with computed values" in plan.parameters[0].problem
    assert plan.kind("a") == "loader"


def test_tensor_that_is_no_parameter_is_seen():
    """A loader that makes its own tensor on every load."""

    def load(parameters, pairs):
        for _, tensor in pairs:
            torch.empty(4).copy_(tensor)

    plan, _, _ = run(load, [("b", F32, (4,))], {"a": torch.zeros(4)})
    assert "no parameter" in plan.names[0].problem


def test_name_that_the_loader_ignores_has_no_copy_and_no_problem():
    """Foreign experts, names that are dropped."""
    plan, _, _ = run(lambda _, pairs: list(pairs), [("b", F32, (4,))], {"a": torch.zeros(4)})
    assert (plan.names[0].copies, plan.names[0].problem) == ((), None)
    assert plan.kind("a") == "untouched"


def test_value_that_is_read_is_seen():
    """A scale that becomes a Python number; who has no way to find out what it would become is told by an error."""

    def load(parameters, pairs):
        for _, tensor in pairs:
            parameters["a"].fill_(tensor.item())

    plan, _, _ = run(load, [("b", F32, ())], {"a": torch.zeros(4)})
    assert "reads its value" in plan.names[0].problem
    assert "filled with a computed value (test_trace.py:" in plan.parameters[0].problem
    assert (plan.fills, plan.kind("a")) == ((), "loader")
    with pytest.raises(TraceError, match=r"failed at b, .*: reads a value \(test_trace.py:\d+\)") as caught:
        trace(
            [("b", F32, ())],
            [Target("a", "", torch.zeros(4))],
            lambda pairs: load({"a": torch.zeros(4)}, pairs),
            may_read=False,
        )
    assert caught.value.reads_values


@pytest.mark.parametrize(
    "read",
    [
        lambda tensor: tensor.tolist(),
        lambda tensor: tensor.numpy(),
        lambda tensor: tensor.cpu().float().numpy(),
        lambda tensor: torch.equal(tensor, torch.zeros(4)),
        lambda tensor: torch.allclose(tensor, tensor),
        lambda tensor: tensor.nonzero(),
        lambda tensor: tensor[tensor > 0],
        torch.unique,
    ],
)
def test_loader_that_needs_values_is_told_from_one_that_does_not_fit(read):
    """Torch's own complaint that there are no values, whatever its words, says that the loader must be given some."""

    def load(parameters, pairs):
        for _, tensor in pairs:
            read(tensor)

    with pytest.raises(TraceError) as caught:
        trace([("b", F32, (4,))], [Target("a", "", torch.zeros(4))], lambda pairs: load({}, pairs))
    assert caught.value.reads_values, caught.value


def test_two_names_onto_one_storage_are_seen():
    """A tied head that the checkpoint has as well: written twice, whichever way round."""
    table = torch.zeros(4, 2)

    def load(parameters, pairs):
        for name, tensor in pairs:
            parameters[name].copy_(tensor)

    plan, _, _ = run(load, [("embed", F32, (4, 2)), ("head", F32, (4, 2))], {"embed": table, "head": table.view(4, 2)})
    assert "written twice, by embed, head" in plan.cover["embed"]


def test_parameter_that_gets_other_memory_is_seen():
    """`param.data = ...` leaves the old memory, which somebody may hold, behind."""

    def load(parameters, pairs):
        for _, tensor in pairs:
            parameters["a"].data = torch.empty(4) if tensor.is_meta else tensor

    parameters = {"a": torch.zeros(4)}
    plan = trace([("a", F32, (4,))], [Target("a", "", parameters["a"])], lambda pairs: load(parameters, pairs))
    assert "other memory" in plan.parameters[0].problem


def test_direct_write_is_told_from_a_loader_s():
    """What reloads layer by layer sees a parameter's own loader only."""
    parameter = torch.zeros(4, device="meta")
    counts = {id(parameter): 0}

    def load(pairs):
        for name, tensor in pairs:
            counts[id(parameter)] += name == "inside"
            parameter.copy_(tensor)
            counts[id(parameter)] -= name == "inside"

    for name in ("inside", "outside"):
        plan = trace([(name, F32, (4,))], [Target("a", "", parameter)], load, counts)
        assert plan.parameters[0].is_bypassed is (name == "outside")


def test_loader_that_raises_is_an_error_that_names_the_parameter():
    """So that a round with a wrong shape fails before a byte moves."""

    def load(parameters, pairs):
        for _, tensor in pairs:
            parameters["a"].copy_(tensor.view(5))

    with pytest.raises(TraceError, match="failed at b") as caught:
        run(load, [("b", F32, (4,))], {"a": torch.zeros(4)})
    assert not caught.value.reads_values


@st.composite
def loaders(draw):
    """A model with fused parameters of random parts, each moved in a random way; and its loader."""
    rows, steps, parameters = [], [], {}
    for number in range(draw(st.integers(1, 4))):
        width = draw(st.sampled_from([2, 4, 6]))
        height = 0
        layer = f"layers.{number}.w"
        for part in range(draw(st.integers(1, 3))):
            name = f"layers.{number}.p{part}"
            rows_here = draw(st.sampled_from([2, 4]))
            way = draw(
                st.sampled_from(
                    ["plain", "transposed", "shard", "columns", "stacked", "regrouped", "copied", "strided"]
                )
            )
            shape = {
                "plain": (rows_here, width),
                "transposed": (width, rows_here),
                "shard": (rows_here * 2, width),
                "columns": (rows_here, width * 2),
                "stacked": (2, rows_here // 2, width),
                "regrouped": (2, width, rows_here // 2),
                "copied": (width, rows_here),
                "strided": (rows_here * 2, width),
            }[way]
            rows.append((name, F32, shape))
            steps.append((name, layer, way, height, rows_here))
            height += rows_here
        padding = draw(st.integers(0, 2))
        steps.append(("", layer, "fill", height, padding))
        tensor = torch.zeros(height + padding, width)
        parameters[layer] = tensor.t().contiguous().t() if draw(st.booleans()) else tensor
    return rows, steps, parameters


def apply_steps(steps, parameters, pairs):
    values = dict(pairs)
    moves = {
        "plain": lambda v: v,
        "transposed": lambda v: v.t(),
        "shard": lambda v: v.chunk(2)[1],
        "columns": lambda v: v.chunk(2, dim=1)[1],
        "stacked": lambda v: torch.cat(v.unbind(0)),
        "regrouped": lambda v: v.permute(0, 2, 1).reshape(-1, v.shape[1]),
        "copied": lambda v: v.t().contiguous().clone(),
        "strided": lambda v: v.contiguous()[1::2],
    }
    for name, layer, way, start, size in steps:
        region = parameters[layer][start : start + size]
        if way == "fill":
            region.fill_(3)
        else:
            region.copy_(moves[way](values[name]))


@settings(deadline=None)  # a busy machine takes any time
@given(loaders())
def test_replay_equals_load(case):
    """For random trees of fused, sliced, stacked, transposed and filled parameters."""
    rows, steps, parameters = case
    plan, values, loaded = run(lambda p, pairs: apply_steps(steps, p, pairs), rows, parameters)
    assert not [name.problem for name in plan.names if name.problem]
    result = {name: torch.full_like(tensor, 77) for name, tensor in parameters.items()}
    for name in plan.names:
        flat = values[name.name].reshape(-1)
        for copy in name.copies:
            clipped = [part for cut in range(0, flat.numel(), 3) for part in copy.clip(cut, cut + 3)]
            assert sum(part.source.num_elements for part in clipped) == copy.source.num_elements
            for part in clipped:
                where = part.destination
                result[part.parameter].as_strided(where.shape, where.strides, where.offset).copy_(part.source.of(flat))
    for fill in plan.fills:
        where = fill.region
        result[fill.parameter].as_strided(where.shape, where.strides, where.offset).fill_(fill.value)
    for name, tensor in loaded.items():
        assert torch.equal(result[name], tensor)
        assert plan.cover[name] is None
