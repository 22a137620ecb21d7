"""Writing into a plain module: by name, or as its own loader says."""

import dataclasses

import pytest
import torch

from wt_common import PlanError
from wt_common.packing import plan_groups
from wt_common.session import Metadata
from wt_worker.installers.base import InstallResult
from wt_worker.installers.module import ModuleInstaller
from wt_worker.placement.inbox import Arrival
from wt_worker.placement.writer import RoundWriter, WriterCache


def parameter(*shape, dtype=torch.float32):
    return torch.nn.Parameter(torch.zeros(shape, dtype=dtype), requires_grad=False)


@pytest.fixture
def model():
    """Parameters of two layers, one of them tied to the head."""
    model = torch.nn.Module()
    model.embed = torch.nn.Module()
    model.embed.weight = parameter(4, 2)
    model.head = torch.nn.Module()
    model.head.weight = model.embed.weight
    model.norm = parameter(3, dtype=torch.bfloat16)
    model.steps = parameter(dtype=torch.int64)
    model.register_buffer("cache", torch.zeros(5), persistent=False)
    return model


@pytest.fixture
def installer(model):
    return ModuleInstaller(model)


ROUND = {
    "embed.weight": ("float32", [4, 2]),
    "norm": ("bfloat16", [3]),
    "steps": ("int64", []),
}


def metadata(**changes):
    """What a round announces: `ROUND`, with other entries or, for None, without."""
    return metadata_of({name: entry for name, entry in {**ROUND, **changes}.items() if entry is not None})


def metadata_of(entries):
    return Metadata(
        round=1,
        names=list(entries),
        dtype_names=[dtype for dtype, _ in entries.values()],
        shapes=[shape for _, shape in entries.values()],
    )


def announced(tensors):
    return metadata_of({name: (str(each.dtype).rpartition(".")[2], list(each.shape)) for name, each in tensors.items()})


def prepare(installer, metadata):
    """What the engine calls: the metadata, and the digest that names them."""
    return installer.prepare(metadata, metadata.digest)


def send(installer, tensors, *, max_bytes=64, announcement=None):
    """A round up to its `finish`, whose result is returned: what the engine does with the bytes of `tensors`."""
    announcement = announcement or announced(tensors)
    prepare(installer, announcement)
    installer.begin()
    dtypes = [tensor.dtype for tensor in tensors.values()]
    writer = RoundWriter(announcement, "m", dtypes, installer, cut_bytes=max_bytes, cache=WriterCache())
    values = [tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in tensors.values()]
    buffer = torch.empty(max_bytes, dtype=torch.uint8)
    for number, group in enumerate(plan_groups(writer.sizes, max_bytes=max_bytes, max_pieces=4096)):
        for piece in group.pieces:
            buffer[piece.offset : piece.offset + piece.num_bytes] = values[piece.index][piece.start :][
                : piece.num_bytes
            ]
        writer.take(group, Arrival.staged(group, buffer), number)
        buffer.fill_(0xEE)
    writer.finish()
    return installer.finish()


def full_round():
    return {
        "embed.weight": torch.arange(8.0).reshape(4, 2) + 1,
        "norm": torch.tensor([1.5, 2.5, 3.5], dtype=torch.bfloat16),
        "steps": torch.tensor(7),
    }


def pointers(model):
    return {name: value.data_ptr() for name, value in model.named_parameters(remove_duplicate=False)}


# --- prepare ---------------------------------------------------------------------------------------------------


def test_fitting_round_passes(installer, model):
    """A round that names every parameter once, with its shape and dtype, has a place; nothing is written by asking."""
    prepared = prepare(installer, metadata())
    assert (prepared.casts, prepared.not_in_place) == ({}, {})
    assert all(name in prepared.binding for name in ROUND)
    assert not any(value.any() for value in model.parameters())
    assert installer.abort() is False


@pytest.mark.parametrize(
    ("changes", "param", "text"),
    [
        ({"norm": ("bfloat16", [3, 1])}, "norm", r"'norm': the model has shape \[3\], the trainer sends \[3, 1\]"),
        ({"steps": ("int64", [1])}, "steps", r"'steps': the model has shape \[\], the trainer sends \[1\]"),
        ({"norm": ("float99", [3])}, "norm", "'norm': torch has no dtype 'float99'"),
        ({"norm": ("nn", [3])}, "norm", "'norm': torch has no dtype 'nn'"),
        ({"norm": ("int8", [3])}, "norm", "'norm': the model has torch.bfloat16, the trainer sends torch.int8"),
        ({"steps": ("float32", [])}, "steps", "'steps': the model has torch.int64, the trainer sends torch.float32"),
        ({"steps": ("int32", [])}, "steps", "'steps': the model has torch.int64, the trainer sends torch.int32"),
        ({"norm": None}, "norm", r"does not send 1 of the model's parameters: \['norm'\]"),
        (
            {"embed.weight": None, "steps": None},
            "steps",
            r"does not send 3 of .*\['steps', 'embed.weight', 'head.weight'\]",
        ),
    ],
    ids=["shape", "0-dim", "dtype", "no dtype", "to int", "from int", "ints", "missing", "tied"],
)
def test_round_that_does_not_fit_is_refused(installer, changes, param, text):
    """A name, shape or dtype without a place, and a parameter without a value, are PlanErrors that name the parameter."""
    for _ in range(2):
        with pytest.raises(PlanError, match=text) as caught:
            prepare(installer, metadata(**changes))
        assert (caught.value.param, caught.value.side, caught.value.phase) == (param, "worker", "update")
    assert prepare(installer, metadata()).not_in_place == {}


def test_floating_dtypes_may_differ(installer):
    """Another floating dtype is cast, and the answer names the model's own."""
    changes = {"embed.weight": ("float64", [4, 2]), "norm": ("float8_e4m3fn", [3])}
    assert prepare(installer, metadata(**changes)).casts == {"embed.weight": "float32", "norm": "bfloat16"}


def test_tied_parameter_may_come_under_any_of_its_names(installer, model):
    """Either name of a tied parameter covers both, and is written in place; under both together it goes through `install`."""
    for name in ("embed.weight", "head.weight"):
        tensors = full_round()
        tensors = {name: tensors.pop("embed.weight") * 2, **tensors}
        assert name in prepare(installer, announced(tensors)).binding
        assert send(installer, tensors) == InstallResult(not_synced=())
        assert torch.equal(model.embed.weight, tensors[name])
    prepared = prepare(installer, metadata(**{"head.weight": ("float32", [4, 2])}))
    assert prepared.not_in_place == {"elements are written twice, by embed.weight, head.weight": ["embed.weight"]}
    assert ("embed.weight" in prepared.binding, "norm" in prepared.binding) == (False, True)


def test_missing_parameters_pass_with_the_cover_check_off(model):
    """A round that leaves parameters out is taken where that was asked for; they are told as not synced."""
    installer = ModuleInstaller(model, check_cover=False)
    assert prepare(installer, metadata(norm=None)).not_synced == ("norm",)


def test_name_that_the_model_lacks_takes_nothing(installer, model):
    """Whether that may be is the trainer's to say; a buffer that no checkpoint has is such a name, too."""
    tensors = {**full_round(), "extra": torch.ones(2), "cache": torch.ones(5)}
    prepared = prepare(installer, announced(tensors))
    taken = {name.name: bool(name.copies) for name in prepared.binding.plan.names}
    assert taken == {"embed.weight": True, "norm": True, "steps": True, "extra": False, "cache": False}
    send(installer, tensors)
    assert torch.equal(model.norm, tensors["norm"])
    assert not model.cache.any()


def test_persistent_buffers_are_written_and_told(model):
    """A buffer of the checkpoint is written as a parameter is; a round that leaves it out is taken, and tells so."""
    model.register_buffer("bias", torch.zeros(3))
    model.register_buffer("count", torch.zeros((), dtype=torch.int64))
    installer = ModuleInstaller(model)
    assert send(installer, full_round()) == InstallResult(not_synced=("bias", "count"))
    tensors = {**full_round(), "bias": torch.tensor([5.0, -5.0, 5.0]), "count": torch.tensor(3)}
    assert prepare(installer, announced(tensors)).not_in_place == {}
    assert send(installer, tensors) == InstallResult(not_synced=())
    assert torch.equal(model.bias, tensors["bias"])
    assert model.count.item() == 3


def test_alias_fills_a_tensor_of_its_own(model):
    """A model that does not tie what the trainer ties gets the same bytes in both, in place or not."""
    model.head.weight = parameter(4, 2)
    for cut in (None, 5):  # a model of its own loader, whose pairs go through it, where cut
        if cut:
            model.load_weights = lambda pairs: [_load_reading(model, *pair) for pair in pairs]
        installer = ModuleInstaller(model)
        tensors = {name: tensor * 2 for name, tensor in full_round().items()}
        announcement = announced(tensors)
        aliased = dataclasses.replace(announcement, aliases={"head.weight": "embed.weight"})
        assert send(installer, tensors, announcement=aliased) == InstallResult(not_synced=())
        assert torch.equal(model.head.weight, tensors["embed.weight"])
        assert torch.equal(model.embed.weight, tensors["embed.weight"])
        assert model.head.weight.data_ptr() != model.embed.weight.data_ptr()
        assert bool(prepare(installer, aliased).not_in_place) is bool(cut)


@pytest.mark.parametrize(
    ("head", "text"),
    [
        (
            parameter(2, 4, 2),
            r"'head.weight': the model has shape \[2, 4, 2\], the trainer sends 'embed.weight' for it, \[4, 2\]",
        ),
        (
            parameter(4, 2, dtype=torch.int64),
            "'head.weight': the model has torch.int64, the trainer sends 'embed.weight' for it",
        ),
    ],
    ids=["shape", "dtype"],
)
def test_alias_that_does_not_fit_is_refused(model, head, text):
    """Also one that torch would spread or round without a word."""
    model.head.weight = head
    aliased = dataclasses.replace(metadata(), aliases={"head.weight": "embed.weight"})
    with pytest.raises(PlanError, match=text) as caught:
        prepare(ModuleInstaller(model), aliased)
    assert caught.value.param == "head.weight"


@pytest.mark.parametrize("dtypes", [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)], ids=str)
def test_alias_of_another_dtype_is_rounded_once(model, dtypes):
    """Where the model has the two names in two dtypes, each holds what a checkpoint with both would put there."""
    model.embed.weight, model.head.weight = (parameter(4, 2, dtype=dtype) for dtype in dtypes)
    installer = ModuleInstaller(model)
    tensors = {**full_round(), "embed.weight": torch.arange(8.0).reshape(4, 2) / 3}
    aliased = dataclasses.replace(announced(tensors), aliases={"head.weight": "embed.weight"})
    assert prepare(installer, aliased).casts == {}
    send(installer, tensors, announcement=aliased)
    for target, dtype in zip((model.embed.weight, model.head.weight), dtypes, strict=True):
        assert torch.equal(target, tensors["embed.weight"].to(dtype))
    model.embed.weight = parameter(4, 2, dtype=torch.bfloat16)
    model.head.weight = parameter(4, 2, dtype=torch.bfloat16)
    assert prepare(ModuleInstaller(model), aliased).casts == {"embed.weight": "bfloat16"}


def test_names_that_a_loader_puts_into_the_same_elements_are_told():
    """So that the sender compares what it sends for them, in the dtype that the model has; else the last one would win."""
    model = Loaded(lambda model, name, tensor: model.w.copy_(tensor), w=torch.zeros(3))
    tensors = {"a": torch.ones(3), "b": torch.ones(3, dtype=torch.bfloat16)}
    prepared = prepare(ModuleInstaller(model), announced(tensors))
    assert (prepared.tied, prepared.casts) == ({"b": "a"}, {"b": "float32"})


def _load_reading(model, name, tensor):
    """A loader that looks at values, so that nobody can follow it."""
    if tensor.numel() and bool(tensor.isnan().any()):
        raise ValueError("not a number")
    model.get_parameter(name).data.copy_(tensor)


def test_alias_of_what_is_tied_here_too_changes_nothing(installer, model):
    """It is neither cover counted twice nor a second write."""
    aliased = dataclasses.replace(metadata(), aliases={"head.weight": "embed.weight", "nowhere": "norm"})
    prepared = prepare(installer, aliased)
    assert (prepared.not_in_place, prepared.not_synced) == ({}, ())
    assert [name.aliases for name in prepared.binding.plan.names] == [(), (), ()]


def test_cover_check_that_is_turned_on_later_counts(model):
    """A round that passed without the check is checked when the next session asks for it."""
    installer = ModuleInstaller(model, check_cover=False)
    prepare(installer, metadata(norm=None))
    installer.check_cover = True
    with pytest.raises(PlanError, match=r"does not send 1 of the model's parameters: \['norm'\]"):
        prepare(installer, metadata(norm=None))


def test_parameter_without_elements_must_be_named(model):
    """It has no byte that could be missing, so its name alone says that it was not forgotten."""
    model.nothing = parameter(0, 3)
    installer = ModuleInstaller(model)
    with pytest.raises(PlanError, match=r"does not send 1 of the model's parameters: \['nothing'\]"):
        prepare(installer, metadata())
    result = send(installer, {**full_round(), "nothing": torch.empty(0, 3)})
    assert result == InstallResult(not_synced=())


def test_same_round_is_prepared_once(installer):
    """As long as the model's tensors are the same ones, the same parameters have the same plan, landings and route."""
    prepared, route_id = prepare(installer, metadata()), installer.route_id
    assert prepare(installer, metadata()) is prepared
    assert installer.route_id == route_id
    assert prepare(installer, metadata(norm=("float32", [3]))) is not prepared
    assert installer.route_id != route_id


def replace_parameter(model):
    model.norm = parameter(3, dtype=torch.bfloat16)


def replace_data(model):
    model.norm.data = torch.zeros(3, dtype=torch.bfloat16)


def replace_layout(model):
    model.embed.weight.data = torch.zeros(2, 4).t()


@pytest.mark.parametrize("change", [replace_parameter, replace_data, replace_layout], ids=lambda each: each.__name__)
def test_replaced_parameter_leads_to_a_new_plan(installer, model, change):
    """After a parameter was replaced the new one is written, and the route is another, so that no old program is used."""
    send(installer, full_round())
    prepared, route_id = prepare(installer, metadata()), installer.route_id
    change(model)
    assert not prepared.binding.is_bound_to(dict(model.named_parameters()))
    again = prepare(installer, metadata())
    assert again is not prepared
    assert again.binding.is_bound_to(dict(model.named_parameters()))
    assert installer.route_id != route_id
    before = pointers(model)
    send(installer, full_round())
    assert pointers(model) == before
    for name, tensor in full_round().items():
        assert torch.equal(model.get_parameter(name), tensor)


def test_refused_replacement_is_refused_again(installer, model):
    """A plan for tensors that are gone does not come back after the new ones were refused."""
    send(installer, full_round())
    model.norm = parameter(5)
    for _ in range(2):
        with pytest.raises(PlanError, match="norm"):
            prepare(installer, metadata())


# --- a round ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_bytes", [6, 64, 1 << 12])
def test_round_is_written_in_place(installer, model, max_bytes):
    """What is sent is in the model under every tied name, where the model's tensors were."""
    before = pointers(model)
    assert send(installer, full_round(), max_bytes=max_bytes) == InstallResult(not_synced=())
    for name, tensor in full_round().items():
        assert torch.equal(model.get_parameter(name), tensor)
    assert torch.equal(model.head.weight, full_round()["embed.weight"])
    assert pointers(model) == before
    assert not model.cache.any()


def test_landings_are_the_parameters_themselves(installer, model):
    """A parameter of the dtype that is sent, a scalar too, lands as a whole in the memory that serves."""
    prepared = prepare(installer, metadata())
    for name in ROUND:
        (landing,) = installer.landings(name)
        assert landing.tensor.data_ptr() == model.get_parameter(name).data_ptr()
        assert prepared.binding.plan.kind(name) == "whole"


def test_memory_with_gaps_is_written_in_place(installer, model):
    """A parameter whose memory is transposed, or a part of a larger tensor, is written where it is; nothing else is."""
    model.embed.weight.data = torch.zeros(2, 4).t()
    table = torch.zeros(5, 2, dtype=torch.bfloat16)
    model.norm.data = table[1:4, 1]
    assert prepare(installer, metadata()).not_in_place == {}
    before = pointers(model)
    send(installer, full_round())
    assert pointers(model) == before
    for name, tensor in full_round().items():
        assert torch.equal(model.get_parameter(name), tensor)
    assert not table[:, 0].any()
    assert not table[[0, 4]].any()


@pytest.mark.parametrize("start", [4, 2, 0], ids=["one behind the other", "overlapping", "one memory twice"])
def test_parameters_that_share_a_storage(start):
    """Parameters that are pieces of one buffer get their own bytes; what two have in common must come with equal values."""
    flat = torch.zeros(8)
    model = torch.nn.Module()
    model.a = torch.nn.Parameter(flat[:4], requires_grad=False)
    model.b = torch.nn.Parameter(flat[start : start + 4], requires_grad=False)
    installer = ModuleInstaller(model)
    tensors = {"a": torch.arange(4.0), "b": torch.arange(4.0) + start}
    assert send(installer, tensors) == InstallResult(not_synced=())
    assert torch.equal(model.a, tensors["a"])
    assert torch.equal(model.b, tensors["b"])
    tensors["b"] += 10
    if start == 4:
        assert send(installer, tensors) == InstallResult(not_synced=())
        return
    with pytest.raises(PlanError, match="the model ties it to 'a', the trainer sends other values"):
        send(installer, tensors)
    assert installer.abort() is True


def test_tied_names_must_come_with_equal_values(installer, model):
    """Both names of a tied parameter may come if they agree; else what came last would silently win, so it is refused."""
    values = torch.tensor([[1.0, float("nan")]] * 4)
    tensors = {**full_round(), "embed.weight": values, "head.weight": values.clone()}
    for _ in range(2):
        assert send(installer, tensors) == InstallResult(not_synced=())
    with pytest.raises(
        PlanError, match=r"the model ties it to 'embed.weight', the trainer sends other values"
    ) as caught:
        send(installer, {**tensors, "head.weight": values + 1})
    assert caught.value.param == "head.weight"
    assert model.embed.weight[0, 0] == 1
    assert installer.abort() is True


def test_values_are_cast_to_the_models_dtype(installer, model):
    """What comes in another floating dtype is rounded as torch does, in place."""
    values = torch.tensor([1 / 3, 2e5, -1.0], dtype=torch.float64)
    before = pointers(model)
    send(installer, {**full_round(), "norm": values})
    assert torch.equal(model.norm, values.to(torch.bfloat16))
    assert pointers(model) == before


def test_parameters_that_require_gradients_can_be_written(model):
    """A model that is not frozen takes weights, too, and no graph comes of it."""
    model.norm.requires_grad_()
    installer = ModuleInstaller(model)
    tensors = full_round()
    tensors = {**tensors, "head.weight": tensors["embed.weight"]}  # one way through `install`
    model.embed.weight.requires_grad_()
    send(installer, tensors)
    assert torch.equal(model.norm, tensors["norm"])
    assert torch.equal(model.embed.weight, tensors["embed.weight"])
    assert (model.norm.grad_fn, model.embed.weight.grad_fn) == (None, None)


def test_what_was_left_out_is_named(model):
    """With the cover check off, the result names what still holds its old value, under all of its names."""
    installer = ModuleInstaller(model, check_cover=False)
    tensors = full_round()
    del tensors["embed.weight"]
    assert send(installer, tensors) == InstallResult(not_synced=("embed.weight", "head.weight"))
    assert not model.embed.weight.any()
    assert send(installer, full_round()) == InstallResult(not_synced=())


def test_abort_says_whether_anything_was_written(installer):
    """False is a promise that no byte changed; after the first write it is True, as often as it is asked."""
    assert installer.abort() is False
    prepare(installer, metadata())
    installer.begin()
    assert installer.abort() is False
    installer.install([])
    assert installer.abort() is False
    installer.install([*full_round().items()][:1])
    assert installer.abort() is True
    assert installer.abort() is True
    installer.begin()
    assert installer.abort() is False
    installer.touch()
    assert installer.abort() is True
    assert installer.abort() is True


def test_round_that_was_committed_is_nobodys_to_abort(installer):
    """After the verdict, what is in the model is what was sent: nothing has changed since."""
    send(installer, full_round())
    installer.commit()
    assert installer.abort() is False


def test_next_round_begins_clean(installer, model):
    """After a round that was aborted in the middle the next one counts for itself."""
    tensors = {**full_round(), "head.weight": full_round()["embed.weight"]}
    prepare(installer, announced(tensors))
    installer.begin()
    installer.install([("head.weight", torch.zeros(4, 2))])
    installer.abort()
    assert send(installer, tensors) == InstallResult(not_synced=())
    assert torch.equal(model.norm, tensors["norm"])
    assert torch.equal(model.embed.weight, tensors["embed.weight"])


def test_landings_before_a_round_are_a_mistake(installer):
    """Whoever asks where something goes before `prepare` is told so."""
    with pytest.raises(RuntimeError, match=r"call prepare\(\) first"):
        installer.landings("norm")


# --- a module's own loader -------------------------------------------------------------------------------------


class Loaded(torch.nn.Module):
    """A module that names its checkpoint's parameters itself: `load` says what becomes of each pair."""

    def __init__(self, load, **parameters):
        super().__init__()
        for name, tensor in parameters.items():
            self.register_parameter(name, torch.nn.Parameter(tensor, requires_grad=False))
        self._load = load
        self.num_loads = 0

    def load_weights(self, pairs):
        self.num_loads += 1
        for name, tensor in pairs:
            self._load(self, name, tensor)


def load_fused(model, name, tensor):
    start = {"q": 0, "k": 4, "v": 6}[name]
    model.qkv[start : start + len(tensor)].copy_(tensor)


def fused_round(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn((rows, 3), generator=generator) for name, rows in (("q", 4), ("k", 2), ("v", 2))}


def fused_model():
    return Loaded(load_fused, qkv=torch.zeros(8, 3))


def test_loader_that_fuses_is_written_in_place():
    """The loader runs once, to be traced; then the parts land where it would put them, in the memory that was there."""
    model = fused_model()
    installer = ModuleInstaller(model)
    before = pointers(model)
    for seed in (1, 2):
        tensors = fused_round(seed)
        assert send(installer, tensors) == InstallResult(not_synced=())
        assert torch.equal(model.qkv, torch.cat([*tensors.values()]))
    assert (model.num_loads, pointers(model)) == (1, before)
    prepared = prepare(installer, announced(fused_round()))
    assert (prepared.not_in_place, prepared.binding.plan.kind("qkv")) == ({}, "contiguous")


def test_fused_parameter_must_come_as_a_whole():
    """A part of a fused parameter would leave a mix: it is refused, with the elements that would be written."""
    tensors = fused_round()
    del tensors["k"]
    installer = ModuleInstaller(fused_model())
    with pytest.raises(PlanError, match=r"'qkv': 18 of 24 elements would be written; send in one round all") as caught:
        prepare(installer, announced(tensors))
    assert caught.value.param == "qkv"
    installer.check_cover = False
    assert prepare(installer, announced(tensors)).not_in_place == {"18 of 24 elements are written": ["qkv"]}


def test_parameter_that_the_loader_never_writes_is_missing():
    """Its name in the checkpoint may be anything, so the model's own is in the text; one without elements is never missing."""
    model = fused_model()
    model.empty = parameter(0)
    assert send(ModuleInstaller(model), fused_round()) == InstallResult(not_synced=())
    model.norm = parameter(3)
    with pytest.raises(PlanError, match=r"does not send 1 of the model's parameters: \['norm'\]"):
        prepare(ModuleInstaller(model), announced(fused_round()))
    result = send(ModuleInstaller(model, check_cover=False), fused_round())
    assert result == InstallResult(not_synced=("norm",))


def test_optional_name_and_alias_that_a_loader_does_not_know():
    """Nothing is taken of them, and all else goes as if they had not come; a wrong shape is an error all the same."""
    tensors = {**fused_round(), "bias": torch.ones(3), "scale": torch.ones(2)}
    known = dataclasses.replace(announced(tensors), optional=[3, 4], aliases={"z": "q"})
    model = fused_model()
    installer = ModuleInstaller(model)
    prepared = prepare(installer, known)
    assert [bool(name.copies) for name in prepared.binding.plan.names] == [True, True, True, False, False]
    assert send(installer, tensors, announcement=known) == InstallResult(not_synced=())
    assert torch.equal(model.qkv, torch.cat([tensors[name] for name in "qkv"]))
    with pytest.raises(PlanError, match="KeyError"):
        prepare(installer, dataclasses.replace(known, optional=[3]))
    wrong = {**fused_round(), "k": torch.ones(2, 5)}
    with pytest.raises(PlanError, match="RuntimeError"):
        prepare(installer, dataclasses.replace(announced(wrong), optional=[1]))


def test_buffer_that_the_loader_would_fill_is_not_synced():
    """A buffer that the model's own loader takes from a checkpoint is missed; one that it does not know is not."""

    def load(model, name, tensor):
        load_fused(model, name, tensor) if name in "qkv" else {"bias": model.bias}[name].copy_(tensor)

    model = Loaded(load, qkv=torch.zeros(8, 3))
    model.register_buffer("bias", torch.zeros(3))
    model.register_buffer("scale", torch.zeros(3))
    installer = ModuleInstaller(model)
    assert send(installer, fused_round()) == InstallResult(not_synced=("bias",))
    assert send(installer, {**fused_round(), "bias": torch.ones(3)}) == InstallResult(not_synced=())
    assert model.bias.all()
    assert not model.scale.any()


@pytest.mark.parametrize(
    ("tensors", "text"),
    [({"w": torch.zeros(1)}, "KeyError"), ({"q": torch.zeros(4, 5)}, "RuntimeError")],
    ids=["name", "shape"],
)
def test_loader_that_raises_refuses_the_round(tensors, text):
    """What the loader has no place for is a PlanError that names the parameter and says what the loader said."""
    (name,) = tensors
    with pytest.raises(
        PlanError, match=f"'{name}': the loader failed at {name}, or shortly before it: {text}"
    ) as caught:
        prepare(ModuleInstaller(fused_model()), announced(tensors))
    assert (caught.value.param, caught.value.side, caught.value.phase) == (name, "worker", "update")


def load_transformed(model, name, tensor):
    model.get_parameter(name).copy_(-torch.exp(tensor) if name == "decay" else tensor)


def test_value_that_is_transformed_goes_through_the_loader():
    """What no copy can express is loaded, in every round; its neighbours are written in place all the same."""
    model = Loaded(load_transformed, decay=torch.zeros(20), plain=torch.zeros(3))
    installer = ModuleInstaller(model)
    before = pointers(model)
    for number in (1, 2):
        tensors = {"decay": torch.randn(20), "plain": torch.randn(3)}
        assert send(installer, tensors) == InstallResult(not_synced=())
        assert torch.equal(model.decay, -torch.exp(tensors["decay"]))
        assert torch.equal(model.plain, tensors["plain"])
        assert model.num_loads == number + 1
    assert pointers(model) == before
    prepared = prepare(installer, announced(tensors))
    ((reason, names),) = prepared.not_in_place.items()
    assert "aten.neg (test_module_installer.py:" in reason
    assert names == ["decay"]
    assert ("decay" in prepared.binding, "plain" in prepared.binding) == (False, True)


def test_what_shares_a_name_with_a_loaded_parameter_is_loaded():
    """A checkpoint parameter goes one way as a whole, so those that it goes to do, and those that they share another with."""

    def load(model, name, tensor):
        if name == "ab":
            model.a[:2].copy_(tensor)
            model.b[:2].copy_(tensor)
        elif name == "bc":
            model.b[2:].copy_(tensor)
            model.c.copy_(tensor)
            model.c.mul_(2)
        else:
            model.get_parameter(name)[-2:].copy_(tensor)

    model = Loaded(load, a=torch.zeros(4), b=torch.zeros(4), c=torch.zeros(2), d=torch.zeros(2))
    tensors = {name: torch.randn(2) for name in ("ab", "bc", "a", "d")}
    installer = ModuleInstaller(model)
    send(installer, tensors)
    assert torch.equal(model.a, torch.cat([tensors["ab"], tensors["a"]]))
    assert torch.equal(model.b, torch.cat([tensors["ab"], tensors["bc"]]))
    assert torch.equal(model.c, tensors["bc"] * 2)
    prepared = prepare(installer, announced(tensors))
    reasons = {name: reason for reason, names in prepared.not_in_place.items() for name in names}
    assert reasons.pop("c").startswith("changed after the copy: aten.mul_ (test_module_installer.py:")
    assert reasons == {"b": "bc goes to c as well", "a": "ab goes to b as well"}
    assert [name for name in tensors if name in prepared.binding] == ["d"]


def load_scaled(model, name, tensor):
    if name == "scale":
        model.scale.fill_(tensor.item())
    else:
        model.get_parameter(name).copy_(tensor)


def load_by_flag(model, name, tensor):
    if name == "scale":
        model.is_high = bool(tensor > 2)
        model.scale.copy_(tensor.expand(4))
    else:
        (model.w if model.is_high else model.scale).copy_(tensor)


def load_lists(model, name, tensor):
    model.get_parameter(name).copy_(torch.tensor(tensor.tolist()))


@pytest.mark.parametrize("load", [load_scaled, load_by_flag, load_lists], ids=lambda each: each.__name__)
def test_loader_that_reads_values_loads_everything(load):
    """What a loader does with a value cannot be known without it, so nothing is in place; every round arrives."""
    model = Loaded(load, scale=torch.zeros(4), w=torch.zeros(4))
    scale = torch.full((4,), 2.5) if load is load_lists else torch.tensor(2.5)
    installer = ModuleInstaller(model)
    before = pointers(model)
    for _ in range(2):
        tensors = {"scale": scale, "w": torch.randn(4)}
        assert send(installer, tensors) == InstallResult(not_synced=())
        assert torch.equal(model.scale, torch.full((4,), 2.5))
        assert torch.equal(model.w, tensors["w"])
    assert pointers(model) == before
    prepared = prepare(installer, announced(tensors))
    ((reason, names),) = prepared.not_in_place.items()
    assert reason.startswith("the loader failed at scale, or shortly before it: ")
    assert load is load_lists or "reads a value (test_module_installer.py:" in reason
    assert names == ["scale", "w"]
    assert not prepared.binding.parameters


def load_padded(model, name, tensor):
    model.embed[:5].copy_(tensor)
    model.embed[5:].fill_(0.5)


def test_constants_are_filled():
    """Padding that the loader writes is written at the end of every round, and counts as written."""
    model = Loaded(load_padded, embed=torch.zeros(8, 2))
    installer = ModuleInstaller(model)
    for _ in range(2):
        model.embed[5:].fill_(77)
        tensors = {"embed": torch.randn(5, 2)}
        assert send(installer, tensors) == InstallResult(not_synced=())
        assert torch.equal(model.embed, torch.cat([tensors["embed"], torch.full((3, 2), 0.5)]))
    assert prepare(installer, announced(tensors)).not_in_place == {}


def test_constant_alone_touches_the_model():
    """A rank that gets nothing but a constant has been written, once the round is finished."""

    def load(model, name, tensor):
        tensor.zero_()
        model.bias.copy_(tensor)

    model = Loaded(load, bias=torch.ones(3))
    installer = ModuleInstaller(model)
    assert send(installer, {"bias": torch.ones(3)}) == InstallResult(not_synced=())
    assert not model.bias.any()
    assert installer.abort() is True


def test_two_names_onto_one_storage_are_loaded():
    """Where the loader writes one memory twice, its own order decides, as it does when it loads."""

    def load(model, name, tensor):
        model.get_parameter(name).copy_(tensor)

    table = torch.zeros(4, 2)
    model = Loaded(load, embed=table, head=table.view(4, 2))
    tensors = {"embed": torch.randn(4, 2), "head": torch.randn(4, 2)}
    installer = ModuleInstaller(model, check_cover=False)
    send(installer, tensors)
    assert torch.equal(table, tensors["head"])
    assert "embed" not in prepare(installer, announced(tensors)).binding


def test_name_that_the_loader_ignores_is_dropped():
    """A checkpoint may have more than the model takes: that has no landing, and is not installed either."""

    def load(model, name, tensor):
        if name != "rotary":
            model.get_parameter(name).copy_(tensor)

    model = Loaded(load, w=torch.zeros(3))
    installer = ModuleInstaller(model)
    tensors = {"rotary": torch.randn(9), "w": torch.randn(3)}
    assert send(installer, tensors) == InstallResult(not_synced=())
    assert torch.equal(model.w, tensors["w"])
    assert installer.landings("rotary") == ()
    assert model.num_loads == 1


def put_by_index(parameter, tensor):
    parameter[torch.tensor([2, 0, 1])] = tensor


def give_other_memory(parameter, tensor):
    parameter.data = torch.empty_like(parameter).copy_(tensor)


def copy_computed(parameter, tensor):
    parameter.copy_(torch.tensor([float(tensor[index]) for index in (2, 0, 1)]))


@pytest.mark.parametrize("write", [put_by_index, give_other_memory, copy_computed], ids=lambda each: each.__name__)
def test_write_that_cannot_be_followed_is_no_gap(write):
    """A parameter that the loader writes in a way of its own is not taken for one that was left out: it is loaded."""

    def load(model, name, tensor):
        write(model.get_parameter(name), tensor)

    model = Loaded(load, w=torch.zeros(3))
    installer = ModuleInstaller(model)
    for number in range(2):
        tensors = {"w": torch.arange(3.0) + number}
        assert send(installer, tensors) == InstallResult(not_synced=())
        expected = torch.zeros(3)
        write(expected, tensors["w"])
        assert torch.equal(model.w, expected)
    assert [*prepare(installer, announced(tensors)).not_in_place.values()] == [["w"]]


def test_tracing_changes_nothing():
    """A loader that replaces parameters and their memory has, once it was traced, replaced nothing of the model."""

    def load(model, name, tensor):
        if name == "data":
            give_other_memory(model.data, tensor)
        elif name == "buffer":
            model.buffer = torch.empty_like(model.buffer).copy_(tensor)
        else:
            model.get_parameter(name).copy_(tensor)
            model.register_parameter(name, torch.nn.Parameter(torch.empty(3), requires_grad=False))

    model = Loaded(load, data=torch.ones(3), replaced=torch.ones(3))
    model.register_buffer("buffer", torch.ones(3))
    before = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    addresses = {name: tensor.data_ptr() for name, tensor in before.items()}
    tensors = {name: torch.zeros(3) for name in before}
    prepare(ModuleInstaller(model), announced(tensors))
    for name, tensor in before.items():
        assert getattr(model, name) is tensor, name
        assert tensor.data_ptr() == addresses[name], name
        assert torch.equal(tensor, torch.ones(3)), name
