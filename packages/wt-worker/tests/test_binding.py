"""A plan bound to tensors: where names land, what is digested, and whether the tensors are still the same ones."""

import pytest
import torch

from wt_common.digest import digest_bytes
from wt_worker.placement.binding import Anchors, Binding, misfit
from wt_worker.placement.trace import Target, trace

F32, BF16 = torch.float32, torch.bfloat16


def digest_of(tensor):
    """By the definition, of the tensor's bytes in row-major order."""
    return digest_bytes(bytes(tensor.detach().contiguous().reshape(-1).view(torch.uint8).tolist()))


def bound(load, tensors, rows, in_place=None):
    """The binding of what tracing `load(tensors, name, value)` finds for `rows`: name, dtype and shape."""
    targets = [Target(name, name.rpartition(".")[0], tensor) for name, tensor in tensors.items()]

    def load_all(pairs):
        for name, value in pairs:
            load(tensors, name, value)

    plan = trace(rows, targets, load_all)
    return Binding(plan, tensors, tensors.keys() if in_place is None else in_place)


def by_name(tensors, name, value):
    tensors[name].copy_(value)


def fused(tensors, name, value):
    start = {"q": 0, "k": 4, "v": 6}[name]
    tensors["qkv"][start : start + len(value)].copy_(value)


FUSED = [("q", F32, (4, 3)), ("k", F32, (2, 3)), ("v", F32, (2, 3))]


def write(binding, **values):
    """Each value where it lands."""
    for name, value in values.items():
        for landing in binding.landings(name):
            landing.region(landing.copy).copy_(landing.copy.source.of(value.reshape(-1)))


def names_of(binding, *wanted):
    return [name for name in binding.plan.names if name.name in wanted]


# --- landings --------------------------------------------------------------------------------------------------


def test_names_land_in_the_tensors_that_serve():
    """What is written to a landing's region is in the tensor, at its place, and in no copy of it."""
    tensors = {"qkv": torch.zeros(8, 3)}
    binding = bound(fused, tensors, FUSED)
    values = {"q": torch.randn(4, 3), "k": torch.randn(2, 3), "v": torch.randn(2, 3)}
    write(binding, **values)
    assert torch.equal(tensors["qkv"], torch.cat([*values.values()]))
    assert all(name in binding for name in values)


def test_region_of_a_part():
    """A part of a landing, as clipping it gives, is the part of the tensor that belongs to it."""
    tensors = {"qkv": torch.arange(24.0).reshape(8, 3)}
    (landing,) = bound(fused, tensors, FUSED).landings("k")
    (part,) = landing.copy.clip(2, 5)
    assert landing.region(landing.copy).tolist() == [12, 13, 14, 15, 16, 17]
    assert landing.region(part.normalized()).reshape(-1).tolist() == [14, 15, 16]


def test_tensor_that_is_a_view_is_written_within_its_memory():
    """A region begins where the tensor does, not where its storage does."""
    storage = torch.zeros(30)
    tensors = {"qkv": storage[5:29].view(8, 3)}
    write(bound(fused, tensors, FUSED), k=torch.ones(2, 3))
    assert storage.nonzero().reshape(-1).tolist() == list(range(17, 23))


def test_parameter_that_requires_a_gradient_can_be_written():
    """What lands is no operation that is differentiated."""
    tensors = {"w": torch.nn.Parameter(torch.zeros(3))}
    write(bound(by_name, tensors, [("w", F32, (3,))]), w=torch.ones(3))
    assert (tensors["w"].tolist(), tensors["w"].grad_fn) == ([1, 1, 1], None)


def test_name_is_in_place_if_all_that_it_goes_to_is():
    """A name of which one parameter is not written in place has no landings; one that goes nowhere has none to write."""

    def load(tensors, name, value):
        for parameter in {"both": ("a", "b"), "one": ("a",), "none": ()}[name]:
            tensors[parameter].copy_(value)

    tensors = {"a": torch.zeros(2), "b": torch.zeros(2)}
    rows = [("both", F32, (2,)), ("one", F32, (2,)), ("none", F32, (2,))]
    binding = bound(load, tensors, rows, in_place=["a"])
    assert binding.parameters == {"a"}
    assert ("both" in binding, "one" in binding, "none" in binding) == (False, True, True)
    assert binding.landings("both") is None
    assert len(binding.landings("one")) == 1
    assert binding.landings("none") == ()
    assert binding.landings("unknown") is None


def test_name_with_a_problem_has_no_landings():
    """What could not be followed is left to the loader, also where its parameters are written in place by others."""

    def load(tensors, name, value):
        tensors[name].copy_(value.exp() if name == "a" else value)

    binding = bound(load, {"a": torch.zeros(2), "b": torch.zeros(2)}, [("a", F32, (2,)), ("b", F32, (2,))])
    assert (binding.landings("a"), "b" in binding) == (None, True)


# --- fill ------------------------------------------------------------------------------------------------------


def test_constants_are_filled_where_the_parameter_is_in_place():
    """Whatever was there, the plan's constants are; elsewhere the loader sees to them."""

    def load(tensors, name, value):
        tensors[name][:2].copy_(value)
        tensors[name][2:].fill_(-1.5)

    tensors = {"a": torch.full((4,), 77.0), "b": torch.full((4,), 77.0)}
    bound(load, tensors, [("a", F32, (2,)), ("b", F32, (2,))], in_place=["a"]).fill()
    assert tensors["a"].tolist() == [77, 77, -1.5, -1.5]
    assert tensors["b"].tolist() == [77, 77, 77, 77]


# --- digests ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [F32, BF16, torch.int8, torch.float64], ids=str)
def test_digest_of_a_whole_parameter(dtype):
    """It is that of the bytes that were sent: both sides compute one number."""
    tensors = {"w": torch.zeros(5, 3, dtype=dtype), "x": torch.zeros(3, dtype=dtype)}
    binding = bound(by_name, tensors, [("w", dtype, (5, 3)), ("x", dtype, (3,))])
    values = {name: torch.randint(-100, 100, tensor.shape).to(dtype) for name, tensor in tensors.items()}
    write(binding, **values)
    assert binding.digests(binding.plan.names) == [[digest_of(values["w"])], [digest_of(values["x"])]]


def test_digests_of_parts_add_up():
    """A name that lands in several places has a digest for each, in the order of its landings; together they are the whole's."""

    def load(tensors, name, value):
        halves = value.view(2, 3, 4)
        tensors["even"].copy_(halves[0])
        tensors["odd"].copy_(halves[1])

    tensors = {"even": torch.zeros(3, 4, dtype=BF16), "odd": torch.zeros(3, 4, dtype=BF16)}
    binding = bound(load, tensors, [("w", BF16, (6, 4))])
    value = torch.randn(6, 4).to(BF16)
    write(binding, w=value)
    (parts,) = binding.digests(binding.plan.names)
    zeros = torch.zeros_like(value)
    assert parts == [digest_of(torch.cat([value[:3], zeros[3:]])), digest_of(torch.cat([zeros[:3], value[3:]]))]
    assert binding.digest_of(binding.plan.names[0]) == digest_of(value) == sum(parts) % (1 << 64)


@pytest.mark.parametrize(
    "move",
    [
        lambda value: value,
        lambda value: value.t(),
        lambda value: value.view(2, 3, 5).transpose(0, 1).reshape(6, 5),
        lambda value: value.t().contiguous().view(5, 2, 3).transpose(0, 1).reshape(10, 3),
    ],
    ids=["plain", "transposed", "regrouped", "both"],
)
@pytest.mark.parametrize("stride", [1, 2], ids=["dense", "gaps"])
@pytest.mark.parametrize("dtype", [F32, BF16, torch.int8], ids=str)
def test_digest_does_not_depend_on_where_elements_lie(move, stride, dtype):
    """Transposed, regrouped, or with gaps in memory: the digest is over the elements in the checkpoint's order."""
    value = torch.randint(-100, 100, (6, 5)).to(dtype)
    expected = move(value)
    store = torch.full((expected.shape[0], expected.shape[1] * stride), 7, dtype=dtype)
    tensors = {"w": store[:, ::stride]}
    binding = bound(lambda tensors, _, given: tensors["w"].copy_(move(given)), tensors, [("w", dtype, (6, 5))])
    write(binding, w=value)
    assert torch.equal(tensors["w"], expected)
    assert binding.digest_of(binding.plan.names[0]) == digest_of(value)


@pytest.mark.parametrize("dim", [0, 1], ids=["rows", "columns"])
@pytest.mark.parametrize("dtype", [F32, BF16, torch.int8], ids=str)
def test_digests_of_shards_add_up(dim, dtype):
    """Ranks that hold a part each have numbers that add up to the trainer's, whichever way the parameter is cut."""
    value = torch.randint(-100, 100, (6, 9)).to(dtype)
    total = start = 0
    for size in (1, 5) if dim == 0 else (2, 7):

        def load(tensors, name, given, part=(dim, start, size)):
            tensors[name].copy_(given.narrow(*part))

        tensors = {"w": torch.zeros_like(value.narrow(dim, start, size)).contiguous()}
        binding = bound(load, tensors, [("w", dtype, (6, 9))])
        write(binding, w=value)
        total += binding.digest_of(binding.plan.names[0])
        start += size
    assert total % (1 << 64) == digest_of(value)


def test_digests_come_in_the_order_asked_for():
    """Those that are computed together and those that are not are put back in their order."""

    def load(tensors, name, value):
        tensors[name].copy_(value.t() if name in "bd" else value)

    tensors = {name: torch.zeros(3, 3) for name in "abcde"}
    binding = bound(load, tensors, [(name, F32, (3, 3)) for name in "abcde"])
    values = {name: torch.randn(3, 3) for name in "abcde"}
    write(binding, **values)
    wanted = [name for name in reversed(binding.plan.names) if name.name != "c"]
    assert binding.digests(wanted) == [[digest_of(values[name])] for name in "edba"]
    assert binding.digests([]) == []


def test_digest_of_what_lands_nowhere():
    """No part, no digest; the sum of none is that of no bytes."""
    binding = bound(lambda *_: None, {"w": torch.zeros(2)}, [("w", F32, (2,))])
    assert binding.digests(binding.plan.names) == [[]]
    assert binding.digest_of(binding.plan.names[0]) == 0


def test_every_bit_counts():
    """A bit that is flipped in the tensor that serves changes the digest of the name that it belongs to, and of no other."""
    tensors = {"qkv": torch.randn(8, 3)}
    binding = bound(fused, tensors, FUSED)
    before = binding.digests(binding.plan.names)
    tensors["qkv"].view(torch.int32)[5, 1] ^= 1 << 20
    after = binding.digests(binding.plan.names)
    assert [one == other for one, other in zip(before, after, strict=True)] == [True, False, True]


# --- identity --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "same"),
    [
        (lambda w: w, True),
        (lambda w: w.view(4, 2), True),
        (lambda w: w.detach(), True),
        (lambda w: w.clone(), False),
        (lambda w: w.view(2, 4), False),
        (lambda w: w.view(torch.int32), False),
        (lambda w: w.as_strided((4, 2), (1, 4)), False),
        (lambda w: w[1:], False),
        (lambda _: None, False),
    ],
    ids=["same", "alias", "detached", "other memory", "shape", "dtype", "strides", "part", "gone"],
)
def test_whether_it_is_bound_to_what_serves(change, same):
    """The same memory in the same layout is the same tensor, whatever object stands for it; anything else is another."""
    w = torch.zeros(4, 2)
    binding = bound(by_name, {"w": w, "x": torch.zeros(2)}, [("w", F32, (4, 2))], in_place=["w"])
    changed = change(w)
    assert binding.is_bound_to({} if changed is None else {"w": changed, "x": torch.zeros(9)}) is same


def test_memory_that_was_replaced_is_not_bound_to():
    """New memory never has the address of the old one, which the binding holds."""
    parameter = torch.nn.Parameter(torch.zeros(1000))
    binding = bound(by_name, {"w": parameter}, [("w", F32, (1000,))])
    for _ in range(3):
        parameter.data = torch.zeros(1000)
        assert not binding.is_bound_to({"w": parameter})


@pytest.mark.parametrize(
    ("served", "text"),
    [
        (torch.zeros(4, 2), None),
        (torch.zeros(4, 3)[:, :2], "w is served with strides (3, 1), and loaded with (2, 1)"),
        (torch.zeros(2, 4).t(), "w is served with strides (1, 4), and loaded with (2, 1)"),
        (torch.zeros(2, 4), "w is served with shape (2, 4), and loaded with (4, 2)"),
        (torch.zeros(4, 2, dtype=BF16), "w is served with dtype bfloat16, and loaded with float32"),
    ],
    ids=["same", "gaps", "transposed", "shape", "dtype"],
)
def test_tensor_that_serves_otherwise_than_it_was_loaded(served, text):
    """The text names the parameter, what differs, what serves and what the loader saw."""
    plan = bound(by_name, {"w": torch.zeros(4, 2)}, [("w", F32, (4, 2))]).plan
    assert misfit(plan, "w", served) == text


# --- anchors ---------------------------------------------------------------------------------------------------


def tree():
    model = torch.nn.Module()
    model.layers = torch.nn.ModuleList([torch.nn.Linear(2, 3), torch.nn.Linear(3, 3)])
    model.register_buffer("scale", torch.ones(2))
    model.head = torch.nn.Module()
    return model


def set_data(model):
    model.layers[1].weight.data = torch.zeros(3, 3)


def set_dtype(model):
    model.layers[1].weight.data = model.layers[1].weight.data.double()


def transpose(model):
    model.layers[1].weight.data = model.layers[1].weight.data.t()


def set_parameter(model):
    model.layers[0].bias = torch.nn.Parameter(model.layers[0].bias.data)


def set_module(model):
    model.layers[0] = torch.nn.Linear(2, 3)


def set_list(model):
    model.layers = torch.nn.ModuleList(model.layers)


def set_head(model):
    model.head = torch.nn.Module()


def set_buffer(model):
    model.scale = torch.ones(2)


def delete(model):
    del model.layers[1].weight


@pytest.mark.parametrize(
    "change", [set_data, set_dtype, transpose, set_parameter, set_module, set_list, set_head, set_buffer, delete]
)
def test_anchors_hold_until_something_is_replaced(change):
    """Other modules, tensors, memory or layouts under the names are found; new values in the same place are not a change."""
    model = tree()
    anchors = Anchors(model, ["layers.0.bias", "layers.1.weight", "scale"], ["head"])
    with torch.no_grad():
        model.layers[1].weight.fill_(3)
        model.layers[1].bias.data = torch.zeros(3)  # nobody asked for it
    assert anchors.hold()
    change(model)
    assert not anchors.hold()
