"""What a model refers to, and which of it is a copy of a parameter."""

import functools
import types
from collections import OrderedDict
from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch

from wt_common.digest import digest_bytes
from wt_worker.placement.prove import Reached, copies_of, reachable, snapshot


def tensor(seed, *shape, dtype=torch.float32):
    return torch.randn(shape or (3, 4), generator=torch.Generator().manual_seed(seed)).to(dtype)


def model_with(**attributes):
    """A model of one layer, which has a weight and these attributes."""
    model = torch.nn.Module()
    model.layer = torch.nn.Linear(4, 3, bias=False)
    for name, value in attributes.items():
        setattr(model.layer, name, value)
    return model


def paths(model):
    """By path from the model, the module and the tensor; each path comes once."""
    found = list(reachable(model))
    assert len({each.path for each in found}) == len(found)
    return {each.path: (each.module, each.tensor) for each in found}


# --- reachable -------------------------------------------------------------------------------------------------


class Plain:
    """An object of no module's: a kernel, a quantization method, a configuration."""

    def __init__(self, **attributes):
        vars(self).update(attributes)

    def apply(self, x):
        return x


@dataclass(slots=True)
class Slotted:
    """An object without a `__dict__`."""

    weight: torch.Tensor


class Derived(Slotted):
    """One whose slots are its base's."""


class Pair(NamedTuple):
    """A tuple with a class of its own."""

    first: int
    second: torch.Tensor


def closure(weight):
    def apply(x):
        return x @ weight

    return apply


def set_weight(linear, weight):
    linear.weight.data = weight
    return linear


def nested_closure(weight):
    inner = closure(weight)

    def apply(x):
        return inner(x)

    return apply


WAYS = {
    "attribute": lambda t: t,
    "list": lambda t: [1, [t]],
    "tuple": lambda t: (None, t),
    "named tuple": lambda t: Pair(1, t),
    "set": lambda t: {1, t},
    "dict": lambda t: {"a": {"b": t}, 3: "x"},
    "ordered dict": lambda t: OrderedDict(a=t),
    "mapping": lambda t: types.MappingProxyType({"a": t}),
    "object": lambda t: Plain(inner=Plain(weight=t)),
    "slots": Slotted,
    "inherited slots": Derived,
    "closure": closure,
    "closure in a closure": nested_closure,
    "partial's argument": lambda t: functools.partial(torch.matmul, t),
    "partial's keyword": lambda t: functools.partial(torch.nn.functional.linear, weight=t),
    "partial's function": lambda t: functools.partial(closure(t), 1),
    "bound method": lambda t: Plain(weight=t).apply,
    "cached function": lambda t: functools.lru_cache(closure(t)),
    "module that is not registered": lambda t: [Plain(module=model_with(cache=t))],
    "torch's module that is not registered": lambda t: [torch.nn.Sequential(set_weight(torch.nn.Linear(4, 3), t))],
    "parameter that is not registered": lambda t: [torch.nn.Parameter(t)],
}


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS.keys())
def test_tensor_is_found(way):
    """A tensor is reached however a layer refers to it, and its path says how; with it comes the module that it hangs on."""
    hidden = tensor(1)
    found = paths(model_with(state=way(hidden)))
    path = next((path for path, each in found.items() if each[1].data_ptr() == hidden.data_ptr()), None)
    assert path is not None, f"not among {[*found]}"
    module, reached = found[path]
    assert path.startswith("layer.state"), path
    assert module == "layer"
    assert torch.equal(reached, hidden)
    assert found["layer.weight"][0] == "layer"


def test_path_says_how_it_is_reached():
    """For whoever reads why a layer is not written in place."""
    model = model_with(method=Plain(kernel=functools.partial(closure(tensor(1)), scales=[tensor(2)])))
    assert {"layer.method.kernel.func.<weight>", "layer.method.kernel.keywords.scales[0]"} <= paths(model).keys()


def test_registered_tensors_come_first():
    """A parameter or buffer is called by its own name, also where an attribute of an earlier module is the same tensor."""
    model = torch.nn.Module()
    model.first = torch.nn.Module()
    model.second = torch.nn.Linear(2, 2, bias=False)
    model.second.register_buffer("scale", torch.ones(2), persistent=False)
    model.first.alias = Plain(weight=model.second.weight, scale=[model.second.scale])
    model.first.extra = torch.ones(3)
    assert [each.path for each in reachable(model)] == ["second.weight", "second.scale", "first.extra"]


def test_each_storage_comes_once():
    """Ties, views and aliases are one memory: writing one of them writes all, so one path stands for them."""
    model = model_with()
    weight = model.layer.weight
    model.head = torch.nn.Module()
    model.head.weight = weight
    model.layer.views = [weight.detach(), weight.data[1:], weight.t()]
    other = tensor(1)
    model.layer.a, model.layer.b = other, [other.view(-1)]
    assert [each.path for each in reachable(model)] == ["layer.weight", "layer.a"]


def test_every_path_is_told_on_request():
    """Views of one storage, and one tensor under two names, are each told under their own path."""
    base = tensor(1)
    model = model_with(first=base, second=[base, base[0]])
    found = [each.path for each in reachable(model, every_path=True)]
    assert sorted(found) == ["layer.first", "layer.second[0]", "layer.second[1]", "layer.weight"]


def test_caches_of_keys_and_values_are_left_out():
    """They are emptied after a round, and no copy of a weight."""
    model = model_with(kv_cache=[tensor(1)], impl=Plain(kv_cache=tensor(2), other=tensor(3)))
    assert paths(model).keys() == {"layer.weight", "layer.impl.other"}


def test_what_has_no_bytes_is_left_out():
    """A tensor on the meta device, or without elements, can be no copy."""
    model = model_with(empty=torch.empty(0), meta=torch.empty(3, device="meta"))
    model.layer.register_parameter("none", None)
    assert paths(model).keys() == {"layer.weight"}


def test_walk_ends():
    """Circles, deep chains and cells that are not filled yet are no trap."""
    plain = Plain()
    plain.self, plain.all = plain, [plain]
    plain.weight = tensor(1)

    def unfilled():
        return later

    if not plain:
        later = 1
    chain = Plain(weight=tensor(2))
    for _ in range(1000):
        chain = Plain(next=chain)
    model = model_with(plain=plain, unfilled=unfilled, chain=chain)
    model.layer.parent = [model]
    assert paths(model).keys() == {"layer.weight", "layer.plain.weight"}


def test_classes_and_modules_are_no_state_of_a_layer():
    """What a layer refers to as code is not walked, and neither are torch's own objects."""

    class Kind:
        shared = tensor(1)

    model = model_with(kind=Kind, code=torch, device=torch.device("cpu"), dtype=torch.float32)
    assert paths(model).keys() == {"layer.weight"}


# --- snapshot --------------------------------------------------------------------------------------------------


def test_snapshot_shows_what_has_changed():
    """By path, where it hangs and the digest of its bytes; one that changes has another one, and no other tensor has."""
    model = model_with(cache=tensor(1), other=tensor(2, dtype=torch.bfloat16))
    before = snapshot(reachable(model))
    assert before.keys() == {"layer.weight", "layer.cache", "layer.other"}
    assert before["layer.cache"] == (
        "layer",
        digest_bytes(bytes(model.layer.cache.view(torch.uint8).flatten().tolist())),
    )
    model.layer.cache[1, 2] += 1
    after = snapshot(reachable(model))
    assert {path for path in before if after[path] != before[path]} == {"layer.cache"}


# --- copies ----------------------------------------------------------------------------------------------------

BF16 = torch.bfloat16
W, OTHER = tensor(1, 6, 4, dtype=BF16), tensor(2, 5, 4, dtype=BF16)

COPIES = {
    "the same": lambda w: w.clone(),
    "in float32": lambda w: w.float(),
    "in float64": lambda w: w.double(),
    "transposed": lambda w: w.t().contiguous(),
    "transposed view": lambda w: w.float().t(),
    "concatenated before": lambda w: torch.cat([w, OTHER]),
    "concatenated behind": lambda w: torch.cat([OTHER, w]).float(),
    "concatenated and transposed": lambda w: torch.cat([OTHER, w]).t().contiguous(),
    "stacked": lambda w: torch.stack([torch.zeros(6, 4, dtype=BF16), w]),
    "padded with rows": lambda w: torch.nn.functional.pad(w, (0, 0, 0, 3)),
    "rows permuted": lambda w: w[[3, 1, 0, 2, 5, 4]],
    "shuffled heads": lambda w: w.view(2, 3, 4).transpose(0, 1).reshape(6, 4),
}


def others(*tensors):
    return [Reached(f"layer.state[{index}]", "layer", each) for index, each in enumerate(tensors)]


@pytest.mark.parametrize("derive", COPIES.values(), ids=COPIES.keys())
def test_copy_is_found(derive):
    """A tensor that has the parameter's first row as a row or a column, in a dtype that holds it, is a copy of it."""
    hidden = others(torch.ones(3), OTHER, derive(W))
    assert copies_of({"layer.weight": W}, hidden) == [("layer.weight", hidden[2])]


def test_copy_that_is_made_at_the_first_forward_is_found():
    """What a layer concatenates lazily is there when the model has served, and hangs on the layer."""

    class Fused(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.gate = torch.nn.Parameter(tensor(1, 3, 4), requires_grad=False)
            self.up = torch.nn.Parameter(tensor(2, 3, 4), requires_grad=False)
            self._kernel = None

        def forward(self, x):
            if self._kernel is None:
                self._kernel = closure(torch.cat([self.gate, self.up]).t().contiguous())
            return self._kernel(x)

    model = torch.nn.Sequential(Fused())
    parameters = dict(model.named_parameters())

    def rest():
        registered = {each.data_ptr() for each in parameters.values()}
        return [each for each in reachable(model) if each.tensor.data_ptr() not in registered]

    assert copies_of(parameters, rest()) == []
    model(torch.ones(1, 4))
    (copy,) = rest()
    assert copy.path == "0._kernel.<weight>"
    assert sorted(copies_of(parameters, [copy]), key=lambda each: each[0]) == [("0.gate", copy), ("0.up", copy)]


NO_COPIES = {
    "nothing": lambda w: torch.zeros(6, 4),
    "constant": lambda w: torch.full((6, 4), w[0, 0].item()),
    "other values": lambda w: tensor(9, 6, 4, dtype=BF16),
    "nearly the same": lambda w: w * (1 + 2**-7),
    "another order": lambda w: w.flip(1),
    "integers": lambda w: w.view(torch.int16),
    "scalar": lambda w: w[0, 0].clone(),
    "other length": lambda w: torch.cat([w, w], dim=1),
}


@pytest.mark.parametrize("make", NO_COPIES.values(), ids=NO_COPIES.keys())
def test_what_is_no_copy_is_not_reported(make):
    """A constant, a number or an unrelated tensor does not keep a layer from being written in place."""
    assert copies_of({"layer.weight": W}, others(make(W))) == []


@pytest.mark.parametrize(
    "parameter",
    [
        torch.ones(4),
        torch.zeros(3, 4),
        torch.tensor(2.0),
        torch.tensor([2.0]),
        tensor(1, 4, 1),
        torch.arange(4),
        torch.empty(0, 4),
    ],
    ids=["ones", "zeros", "scalar", "one element", "rows of one", "integers", "empty"],
)
def test_parameter_that_tells_nothing_is_left_out(parameter):
    """A norm that is all ones is equal to any other, and says nothing of a copy; so does a row of one element."""
    assert copies_of({"norm.weight": parameter}, others(parameter.clone(), torch.ones(3, 4))) == []


def test_vector_is_found():
    """A bias in float32 beside its bfloat16 parameter, or as a row or a column of a table."""
    bias = tensor(1, 8, dtype=BF16)
    table = torch.stack([torch.zeros(8), bias.float()])
    for copy in (bias.float(), table, table.t().contiguous()):
        hidden = others(copy)
        assert copies_of({"bias": bias}, hidden) == [("bias", hidden[0])]


def test_every_pair_is_told():
    """A parameter may have several copies, and a tensor be a copy of several parameters; each pair comes once."""
    one, two = tensor(1), tensor(2)
    first, second = others(two.clone(), torch.cat([one, two, one]))
    found = copies_of({"a": one, "b": two, "c": one.clone()}, [first, second])
    assert sorted((name, each.path) for name, each in found) == [
        ("a", second.path),
        ("b", first.path),
        ("b", second.path),
        ("c", second.path),
    ]


@pytest.mark.parametrize("place", [0, 65_535, 65_536, 69_999])
def test_rows_longer_than_a_block_of_the_digest(place):
    """A row's key covers all of it: two rows that differ in one element are two, on whichever side of the 65,536th."""
    row = tensor(1, 70_000)
    other = row.clone()
    other[place] += 1
    hidden = others(other, row.clone())
    assert copies_of({"w": row}, hidden[:1]) == []
    assert copies_of({"w": row}, hidden) == [("w", hidden[1])]
