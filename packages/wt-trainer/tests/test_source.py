"""Sources: metadata, layout, and the iterators."""

import dataclasses
import json
import subprocess
import sys
from functools import cached_property

import pytest
import torch

import wt_trainer
from wt_common import ConfigurationError, shard_bounds
from wt_trainer import ModuleSource, ParamMeta, RenamedSource, Replicate, Shard, WeightSource, materialize_full_tensor


def meta(name="layers.0.w", shape=(8, 4), **layout):
    return ParamMeta(name, torch.bfloat16, shape, **layout)


# --- ParamMeta -------------------------------------------------------------------------------------------------


def test_defaults_are_replicated_everywhere():
    """A parameter of which only name, dtype and shape are known is owned whole by every rank."""
    plain = ParamMeta("w", torch.float32, (2, 3))
    assert (plain.owners, plain.mesh_shape, plain.placements) == (None, None, None)
    assert plain.num_bytes == 24


def test_values_are_normalised_to_tuples():
    """However shape, owners, mesh and placements are given, equal layouts are equal, and hashable."""
    given = meta(shape=torch.Size([8, 4]), owners=[0, 1], mesh_shape=[2], placements=[Shard(0)])
    assert given == meta(shape=[8, 4], owners=(0, 1), placements=(Shard(0),))
    assert (given.shape, given.owners, given.mesh_shape) == ((8, 4), (0, 1), (2,))
    assert len({given, meta(owners=range(2), placements=[Shard(0)])}) == 1


def test_mesh_defaults_to_one_axis_over_the_owners():
    """Without a mesh shape the owners are one axis."""
    assert meta(owners=(3, 1, 2)).mesh_shape == (3,)


def test_all_replicate_is_none():
    """Placements that shard nothing mean the same as none, and compare so."""
    assert meta(owners=(0, 1), placements=[Replicate()]) == meta(owners=(0, 1))


def test_placements_keep_mesh_order():
    """A mixed layout keeps one placement per axis, replicated ones included."""
    given = meta(owners=range(4), mesh_shape=(2, 2), placements=[Replicate(), Shard(1)])
    assert given.placements == (Replicate(), Shard(1))


@pytest.mark.parametrize(
    ("shape", "num_bytes"), [((), 2), ((0, 5), 0), ((3,), 6), ((1 << 20, 1 << 20), 1 << 41)], ids=str
)
def test_num_bytes_is_that_of_the_whole_tensor(shape, num_bytes):
    """`num_bytes` counts the full tensor whatever the layout, a scalar and an empty one included."""
    assert meta(shape=shape).num_bytes == num_bytes


def test_meta_cannot_be_changed():
    """Metadata is planned from once, so it is frozen."""
    with pytest.raises(dataclasses.FrozenInstanceError):
        meta().shape = (1,)


@pytest.mark.parametrize(
    ("error", "layout", "text"),
    [
        (ValueError, {"mesh_shape": (1,)}, "mesh_shape and placements need owners"),
        (ValueError, {"placements": (Shard(0),)}, "mesh_shape and placements need owners"),
        (ValueError, {"owners": ()}, "owners must be distinct trainer ranks, at least one, got"),
        (ValueError, {"owners": (0, 0)}, "owners must be distinct trainer ranks"),
        (ValueError, {"owners": (0, -1)}, "owners must be distinct trainer ranks"),
        (ValueError, {"owners": (0, "1")}, "owners must be ints"),
        (ValueError, {"owners": (0, True)}, "owners must be ints"),
        (ValueError, {"owners": (0.0,)}, "owners must be ints"),
        (ValueError, {"owners": (0, 1), "mesh_shape": (3,)}, r"mesh_shape \(3,\) must multiply to the 2 owners"),
        (ValueError, {"owners": (0, 1), "mesh_shape": (-1, -2)}, "must multiply to the 2 owners"),
        (ValueError, {"owners": (0, 1), "mesh_shape": ()}, "must multiply to the 2 owners"),
        (ValueError, {"owners": (0, 1), "placements": ()}, "one placement for each of the 1 mesh axes, got 0"),
        (ValueError, {"owners": (0, 1), "placements": (Shard(0), Shard(1))}, "each of the 1 mesh axes, got 2"),
        (ValueError, {"owners": (0, 1), "placements": (Shard(2),)}, "shards dim 2 of a 2-D tensor"),
        (ValueError, {"owners": (0, 1), "placements": (Shard(-1),)}, "shards dim -1 of a 2-D tensor"),
        (TypeError, {"owners": (0, 1), "placements": ("shard",)}, r"a placement is Replicate\(\) or Shard\(dim\)"),
        (TypeError, {"owners": (0, 1), "placements": (0,)}, r"a placement is Replicate\(\) or Shard\(dim\)"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_impossible_layout_is_refused_by_parameter(error, layout, text):
    """A layout that cannot be is refused where it is declared; the text names the parameter and what is wrong."""
    with pytest.raises(error, match=rf"^parameter 'layers.0.w'.*{text}"):
        meta(**layout)


@pytest.mark.parametrize("num_shards", range(1, 8))
@pytest.mark.parametrize("size", [0, 1, 2, 5, 7, 8, 13])
def test_shards_are_those_of_torch_chunk(size, num_shards):
    """`Shard` splits as `torch.chunk` does; pieces that chunk leaves out are empty."""
    pieces = [piece.tolist() for piece in torch.arange(size).chunk(num_shards)]
    pieces += [[]] * (num_shards - len(pieces))
    assert [list(range(*shard_bounds(size, num_shards, index))) for index in range(num_shards)] == pieces


# --- WeightSource ----------------------------------------------------------------------------------------------


class Sharded(WeightSource):
    """Three parameters: one everywhere, one on ranks 1 and 0, one on rank 2."""

    @cached_property
    def metadata(self):
        return [meta("a"), meta("b", owners=(1, 0)), meta("c", owners=(2,))]

    def iter_full(self):
        yield from ((each.name, torch.zeros(each.shape, dtype=each.dtype)) for each in self.metadata)


def test_metadata_as_a_property_is_refused_at_class_creation():
    """`metadata` that is computed at each access is a TypeError when the class is made; it says what to write."""
    with pytest.raises(TypeError, match=r"Mine.metadata must be a functools.cached_property, got property"):

        class Mine(WeightSource):
            @property
            def metadata(self):
                return []


@pytest.mark.parametrize(
    ("value", "kind"), [([], "list"), (lambda self: [], "function"), (classmethod(lambda cls: []), "classmethod")]
)
def test_metadata_as_anything_else_is_refused_at_class_creation(value, kind):
    """A method, a class method or a plain value in place of the cached property is refused like a property."""
    with pytest.raises(TypeError, match=f"got {kind}"):
        type("Mine", (WeightSource,), {"metadata": value})


def test_subclass_of_a_source_is_checked_too():
    """A subclass may keep its parent's metadata, and may not replace it by a property."""
    assert type("Kept", (Sharded,), {})().metadata == Sharded().metadata
    with pytest.raises(TypeError, match="cached_property"):
        type("Replaced", (Sharded,), {"metadata": property(lambda self: [])})


def test_source_without_metadata_cannot_be_made():
    """`metadata` is the one thing that every source must have."""
    with pytest.raises(TypeError, match="metadata"):
        type("Nothing", (WeightSource,), {})()


def test_owned_names_are_in_metadata_order():
    """A rank owns what names it, and what names nobody."""
    assert [Sharded().owned_names(rank) for rank in range(4)] == [["a", "b"], ["a", "b"], ["a", "c"], ["a"]]


def test_source_says_which_iterators_it_has():
    """A mode is implemented when the class overrides it; the other one raises, and names source and method."""
    source = Sharded()
    assert source.implements_iter_full()
    assert not source.implements_iter_local()
    with pytest.raises(NotImplementedError, match=r"Sharded does not implement iter_local\(\)"):
        source.iter_local()


def test_iterating_a_source_is_iter_full():
    """`for name, tensor in source` runs a fresh `iter_full` each time."""
    source = Sharded()
    assert [name for name, _ in source] == [name for name, _ in source] == ["a", "b", "c"]


# --- ModuleSource on plain modules -----------------------------------------------------------------------------


class Tied(torch.nn.Module):
    """An embedding whose weight is the head's too, a buffer, a scalar and an empty parameter."""

    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(5, 3)
        self.head = torch.nn.Linear(3, 5, bias=True, dtype=torch.float64)
        self.head.weight = self.embed.weight
        self.scale = torch.nn.Parameter(torch.tensor(2.0), requires_grad=False)
        self.none = torch.nn.Parameter(torch.empty(0, 4))
        self.register_buffer("seen", torch.zeros(1))


def test_module_source_declares_each_parameter_once():
    """Tied tensors come once, under their first name, persistent buffers too; dtypes and shapes are the tensors' own."""
    assert {each.name: each for each in ModuleSource(Tied()).metadata} == {
        "embed.weight": ParamMeta("embed.weight", torch.float32, (5, 3)),
        "head.bias": ParamMeta("head.bias", torch.float64, (5,)),
        "scale": ParamMeta("scale", torch.float32, ()),
        "none": ParamMeta("none", torch.float32, (0, 4)),
        "seen": ParamMeta("seen", torch.float32, (1,), optional=True),
    }


@pytest.mark.parametrize("iterator", ["iter_full", "iter_local"])
def test_module_source_yields_what_it_declares(iterator):
    """Both iterators yield the owned names in metadata order, detached, sharing the module's memory."""
    module = Tied()
    source = ModuleSource(module)
    items = list(getattr(source, iterator)())
    assert [name for name, _ in items] == source.owned_names(0) == source.owned_names(7)
    tensors = module.state_dict()
    for declared, (name, tensor) in zip(source.metadata, items, strict=True):
        assert (tensor.dtype, tuple(tensor.shape)) == (declared.dtype, declared.shape)
        assert not tensor.requires_grad
        assert tensor.data_ptr() == tensors[name].data_ptr()


def test_module_source_yields_the_weights_of_the_moment():
    """Each pass is fresh: what a training step wrote since the last one is what comes."""
    module = torch.nn.Linear(2, 2)
    source = ModuleSource(module)
    before = {name: tensor.clone() for name, tensor in source}
    with torch.no_grad():
        module.weight.add_(1)
    after = dict(iter(source))
    assert torch.equal(after["weight"], before["weight"] + 1)
    assert torch.equal(after["bias"], before["bias"])


def test_module_source_has_both_modes():
    """A module can be sent whole or by pieces."""
    source = ModuleSource(torch.nn.Linear(1, 1))
    assert source.implements_iter_full()
    assert source.implements_iter_local()


def test_plain_tensor_is_its_own_full_tensor():
    """A tensor that is not distributed is returned as it is, not copied."""
    tensor = torch.ones(3)
    assert materialize_full_tensor(tensor) is tensor


# --- RenamedSource ---------------------------------------------------------------------------------------------


class Fused(torch.nn.Module):
    """Two experts in one parameter, a tied head, and a name with a wrapper's prefix in front."""

    def __init__(self):
        super().__init__()
        self._orig_mod = torch.nn.Module()
        self._orig_mod.embed = torch.nn.Linear(2, 3, bias=False)
        self._orig_mod.head = torch.nn.Module()
        self._orig_mod.head.weight = self._orig_mod.embed.weight
        self._orig_mod.experts = torch.nn.Parameter(torch.randn(2, 4, 3))
        self._orig_mod.scratch = torch.nn.Parameter(torch.zeros(1))


def checkpoint_name(name, tensor):
    name = name.removeprefix("_orig_mod.")
    if name == "scratch":
        return ()
    return [(f"experts.{i}.weight", expert) for i, expert in enumerate(tensor)] if name == "experts" else name


def test_renamed_source_declares_and_yields_the_new_names():
    """One function gives metadata and tensors alike: renamed, taken apart, or left out."""
    module = Fused()
    source = RenamedSource(ModuleSource(module), checkpoint_name)
    assert [(meta.name, meta.shape) for meta in source.metadata] == [
        ("experts.0.weight", (4, 3)),
        ("experts.1.weight", (4, 3)),
        ("embed.weight", (3, 2)),
    ]
    yielded = dict(source)
    assert list(yielded) == source.owned_names(0) == [meta.name for meta in source.metadata]
    assert torch.equal(yielded["experts.1.weight"], module._orig_mod.experts[1])
    assert yielded["embed.weight"].data_ptr() == module._orig_mod.embed.weight.data_ptr()


def test_tied_names_are_aliases_of_the_first():
    """What is not sent, since another name has the same tensor, is known with that name, also under new names."""
    source = ModuleSource(Fused())
    assert source.aliases == {"_orig_mod.head.weight": "_orig_mod.embed.weight"}
    assert RenamedSource(source, checkpoint_name).aliases == {"head.weight": "embed.weight"}
    assert ModuleSource(torch.nn.Linear(1, 1)).aliases == {}


def test_tied_name_that_is_left_out_is_no_alias():
    """A function may leave out the second name of a tied parameter, which then is none of the checkpoint's."""
    source = RenamedSource(ModuleSource(Fused()), lambda name, tensor: [] if "head" in name else name)
    assert source.aliases == {}
    both = RenamedSource(ModuleSource(Fused()), lambda name, tensor: [] if "head" in name or "embed" in name else name)
    assert both.aliases == {}
    one = RenamedSource(ModuleSource(Fused()), lambda name, tensor: "embed" if name.endswith(".weight") else name)
    assert one.aliases == {}


def test_tied_names_may_be_computed_alike():
    """What a function does to both names alike is the same tensor."""
    source = RenamedSource(
        ModuleSource(Fused()), lambda name, tensor: [(f"{name}.t", tensor.t()), (f"{name}.h", tensor.half())]
    )
    assert source.aliases == {f"_orig_mod.head.weight.{part}": f"_orig_mod.embed.weight.{part}" for part in ("t", "h")}


@pytest.mark.parametrize(
    "fn",
    [
        lambda name, tensor: [] if "embed" in name else name,
        lambda name, tensor: [(f"{name}.{i}", row) for i, row in enumerate(tensor)] if "head" in name else name,
        lambda name, tensor: [(name, tensor / 2)] if "head" in name else name,
        lambda name, tensor: [(name, tensor.t())] if "head" in name else name,
        lambda name, tensor: [(name, tensor.bfloat16())] if "head" in name else name,
        lambda name, tensor: [(f"{name}.{i}", tensor[i]) for i in ((1, 0) if "head" in name else (0, 1))],
    ],
    ids=["first left out", "taken apart otherwise", "computed", "transposed", "another dtype", "another order"],
)
def test_tied_names_that_do_not_match_are_refused(fn):
    """A tied name that would get no tensor, another one than what is sent, or whose parts have no counterpart, is named."""
    with pytest.raises(
        ConfigurationError, match=r"'_orig_mod.head.weight' is tied to '_orig_mod.embed.weight'"
    ) as caught:
        _ = RenamedSource(ModuleSource(Fused()), fn).aliases
    assert caught.value.param == "_orig_mod.head.weight"


@pytest.mark.parametrize(
    ("returned", "got"),
    [
        (None, "got None"),
        (7, "got int"),
        (torch.zeros(2), "got Tensor"),
        ([("a",)], "got list"),
        ([("a", 3)], "got list"),
        ([("a", torch.zeros(1)), "b"], "got list"),
        ({"a": torch.zeros(1)}, "got dict"),
    ],
    ids=str,
)
def test_function_that_returns_no_names_is_refused(returned, got):
    """What is neither a name nor pairs is a ConfigurationError with the parameter, for the metadata and for the tensors."""
    source = RenamedSource(ModuleSource(Fused()), lambda name, tensor: returned)
    for use in (lambda: source.metadata, lambda: list(source.iter_full()), lambda: source.aliases):
        with pytest.raises(ConfigurationError, match=rf"expected fn to return its new name, or .* {got}") as caught:
            use()
        assert caught.value.param.startswith("_orig_mod.")


class Buffered(torch.nn.Module):
    """Two layers, the first with a persistent buffer and one that is not, which the second has as well."""

    def __init__(self):
        super().__init__()
        self.gate = torch.nn.Linear(2, 2, bias=False)
        self.gate.register_buffer("correction", torch.tensor([5.0, -5.0]))
        self.gate.register_buffer("cache", torch.zeros(2), persistent=False)
        self.gate.register_buffer("nothing", None)
        self.head = torch.nn.Linear(2, 2, bias=False)
        self.head.register_buffer("shared", self.gate.correction)


def test_persistent_buffers_stand_at_their_module():
    """A module's buffers follow its parameters, are optional, and keep those that are no part of a checkpoint out."""
    module = Buffered()
    source = ModuleSource(module)
    assert [meta.name for meta in source.metadata] == ["gate.weight", "gate.correction", "head.weight"]
    assert [meta.optional for meta in source.metadata] == [False, True, False]
    assert source.aliases == {"head.shared": "gate.correction"}
    for iterate in (source.iter_full, source.iter_local):
        yielded = dict(iterate())
        assert list(yielded) == source.owned_names(0) == [meta.name for meta in source.metadata]
        assert yielded["gate.correction"].data_ptr() == module.gate.correction.data_ptr()
    assert {*yielded, *source.aliases} == module.state_dict().keys()


def test_buffers_can_be_left_out():
    """Then the source has the parameters alone."""
    source = ModuleSource(Buffered(), buffers=False)
    assert [meta.name for meta in source.metadata] == ["gate.weight", "head.weight"]
    assert [name for name, _ in source] == ["gate.weight", "head.weight"]
    assert source.aliases == {}


def test_renamed_buffer_is_optional_too():
    """Also where it is taken apart."""
    source = RenamedSource(ModuleSource(Buffered()), lambda name, tensor: [(f"{name}.0", tensor[:1])])
    assert [meta.optional for meta in source.metadata] == [False, True, False]


def test_renamed_shards_are_those_of_the_source():
    """A renamed parameter keeps its layout; one that is taken apart has no shards, and the error names it."""

    class Sharded(WeightSource):
        @cached_property
        def metadata(self):
            return [ParamMeta("a", torch.float32, (4, 2), owners=(0, 1), placements=(Shard(0),))]

        def iter_local(self):
            yield "a", torch.zeros(2, 2)

    renamed = RenamedSource(Sharded(), lambda name, tensor: f"x.{name}")
    assert (renamed.metadata[0].name, renamed.metadata[0].placements) == ("x.a", (Shard(0),))
    assert [(name, tensor.shape) for name, tensor in renamed.iter_local()] == [("x.a", (2, 2))]
    assert (renamed.implements_iter_full(), renamed.implements_iter_local()) == (False, True)
    cut = RenamedSource(Sharded(), lambda name, tensor: [("left", tensor[:, :1]), ("right", tensor[:, 1:])])
    assert [(meta.name, meta.shape, meta.owners, meta.placements) for meta in cut.metadata] == [
        ("left", (4, 1), (0, 1), None),
        ("right", (4, 1), (0, 1), None),
    ]
    with pytest.raises(ConfigurationError, match="'a' is taken apart"):
        list(cut.iter_local())


# --- whose tensors are stable ----------------------------------------------------------------------------------


def test_a_source_vouches_for_nothing_unless_it_says_so():
    """Nobody's tensors are taken to be stable by default; those of a module are."""
    assert not Sharded().yields_stable
    assert ModuleSource(torch.nn.Linear(1, 1)).yields_stable
    assert type("Stable", (Sharded,), {"yields_stable": True})().yields_stable


@pytest.mark.parametrize("iterator", ["iter_full", "iter_local"])
@pytest.mark.parametrize("base", [ModuleSource, RenamedSource, type("Stable", (Sharded,), {"yields_stable": True})])
def test_who_overrides_an_iterator_must_vouch_for_it(base, iterator):
    """A subclass whose own iterator may write between two tensors of its base's does not inherit the base's word."""
    assert type("Other", (base,), {"__init__": lambda self: None}).yields_stable is base.yields_stable
    merging = type("Merging", (base,), {iterator: lambda self: iter(()), "__init__": lambda self: None})
    assert not merging().yields_stable
    vouching = type("Vouching", (base,), {iterator: merging.iter_full, "yields_stable": True})
    assert vouching.yields_stable


@pytest.mark.parametrize("iterator", ["iter_full", "iter_local"])
@pytest.mark.parametrize("is_stable", [True, False])
def test_renamed_tensor_is_as_stable_as_the_source_says(iterator, is_stable):
    """The other source's word holds for a tensor that is only renamed, in both modes, and is asked for each."""

    class Alternating(WeightSource):
        metadata = Sharded.metadata

        def iter_full(self):
            for each in self.metadata:
                self.yields_stable = is_stable and each.name != "b"
                yield each.name, torch.zeros(each.shape, dtype=each.dtype)
                self.yields_stable = False  # of the next one, which is not there yet

        iter_local = iter_full

    source = RenamedSource(Alternating(), lambda name, tensor: f"x.{name}")
    found = {name: source.yields_stable for name, _ in getattr(source, iterator)()}
    assert found == {"x.a": is_stable, "x.b": False, "x.c": is_stable}


def test_part_is_stable_if_it_is_the_sources_own_memory():
    """Views of a stable tensor are stable; what the function has computed is not, nor what it may still write to."""
    module = torch.nn.Linear(4, 4, bias=False)

    def parts(name, tensor):
        return [
            ("same", tensor),
            ("view", tensor[:2].t()),
            ("detached", tensor.detach().data[0]),
            ("computed", tensor + 1),
            ("copied", tensor.contiguous().clone()),
            ("sparse", tensor.to_sparse()),
        ]

    found = []
    for kind in (list, tuple, iter):
        source = RenamedSource(ModuleSource(module), lambda name, tensor, kind=kind: kind(parts(name, tensor)))
        found.append([name for name, _ in source.iter_full() if source.yields_stable])
    assert found == [["same", "view", "detached"]] * 2 + [[]]


# --- ModuleSource on DTensors: two real ranks over gloo --------------------------------------------------------

RANKS = 2
FULL = [[3.0 * row + column for column in range(3)] for row in range(5)]


@pytest.fixture(scope="module")
def ranks(dtensor_ranks):
    """What each rank of a default group found, one dict per rank."""
    process, directory = dtensor_ranks
    out, _ = process.communicate(timeout=100)
    assert process.returncode == 0, out
    return [json.loads((directory / f"rank{rank}.json").read_text()) for rank in range(RANKS)]


def test_dtensor_metadata_is_that_of_its_mesh(ranks):
    """A DTensor is declared with its global shape, its mesh's ranks and its placements, the same on every rank."""
    everybody = list(range(RANKS))
    expected = [
        ["plain", None, None, "None"],
        ["rows", everybody, [RANKS], "(Shard(dim=0),)"],
        ["columns", everybody, [RANKS], "(Shard(dim=1),)"],
        ["replicated", everybody, [RANKS], "None"],
        ["both", everybody, [1, RANKS], "(Replicate(), Shard(dim=0))"],
        ["partial", everybody, [RANKS], "None"],
        ["strided", everybody, [RANKS], "None"],
        ["last", [RANKS - 1], [1], "(Shard(dim=0),)"],
        ["slice", everybody, [RANKS, 1, 1], "(Replicate(), Replicate(), Shard(dim=0))"],
        ["outer slice", everybody, [RANKS], "(Shard(dim=0),)"],
    ]
    for rank in ranks:
        assert rank["metadata"] == [[name, "torch.float32", [5, 3], *layout] for name, *layout in expected]


def test_dtensor_iterators_yield_exactly_the_owned_names(ranks):
    """Both iterators yield a rank's owned names in metadata order, as plain detached tensors."""
    for number, rank in enumerate(ranks):
        expected = [name for name, _, _, owners, _, _ in rank["metadata"] if owners is None or number in owners]
        assert rank["owned"] == list(rank["full"]) == list(rank["local"]) == expected
        for kind, requires_grad, _ in [*rank["full"].values(), *rank["local"].values()]:
            assert (kind, requires_grad) == ("Tensor", False)


def test_dtensor_iter_full_yields_whole_tensors(ranks):
    """`iter_full` yields the whole tensor on every owner, whatever its placements, a partial one summed."""
    for rank in ranks:
        assert {name: value for name, (_, _, value) in rank["full"].items()} == dict.fromkeys(rank["owned"], FULL)


def test_dtensor_iter_local_yields_the_declared_pieces(ranks):
    """`iter_local` yields the piece that placements and splitting rule describe, and whole tensors without them."""
    for number, rank in enumerate(ranks):
        local = {name: value for name, (_, _, value) in rank["local"].items()}
        start, stop = shard_bounds(5, RANKS, number)
        left, right = shard_bounds(3, RANKS, number)
        assert local["rows"] == local["both"] == local["outer slice"] == FULL[start:stop]
        assert local["columns"] == [row[left:right] for row in FULL]
        assert local["plain"] == local["replicated"] == local["partial"] == local["strided"] == local["slice"] == FULL
        assert local.get("last", FULL) == FULL


def test_dtensor_ranks_are_those_of_the_default_group(ranks):
    """Asking for another rank than the default group's is a ConfigurationError that names both."""
    for number, rank in enumerate(ranks):
        assert f"expected rank {number + 1} as in the init info, the default group has {number}" in rank["mismatch"]


# --- import ----------------------------------------------------------------------------------------------------


def test_import_loads_neither_requests_nor_dtensor():
    """Importing the package, and a source of a plain module, load neither `requests` nor DTensor nor a backend."""
    code = (
        "import sys, torch; before = set(sys.modules)\n"
        "import wt_trainer; list(wt_trainer.ModuleSource(torch.nn.Linear(1, 1)).iter_local())\n"
        "wt_trainer.HTTPVLLMWeightSyncClient('http://127.0.0.1:1')\n"
        "print(*sorted(set(sys.modules) - before), sep='\\n')"
    )
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    names = loaded.stdout.split()
    assert "wt_trainer" in names
    for prefix in ("requests", "torch.distributed.tensor", "ray", "vllm", "wt_trainer.backends", "wt_trainer.channels"):
        assert [name for name in names if name == prefix or name.startswith(f"{prefix}.")] == []


def test_public_names_are_all_there_and_sorted():
    """Everything the package lists can be imported from it, in alphabetical order."""
    assert list(wt_trainer.__all__) == sorted(wt_trainer.__all__)
    assert all(hasattr(wt_trainer, name) for name in wt_trainer.__all__)


def test_configuration_error_is_the_documented_value_error():
    """Who catches ValueError, as the documented API says, catches a ConfigurationError of a source."""
    assert issubclass(ConfigurationError, ValueError)
