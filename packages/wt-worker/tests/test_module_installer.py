"""Copying by name into a plain module."""

import pytest
import torch

from wt_common import PlanError
from wt_common.session import Metadata
from wt_worker.installers.base import InstallResult
from wt_worker.installers.module import ModuleInstaller


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
    model.register_buffer("cache", torch.zeros(5))
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
    entries = {name: entry for name, entry in {**ROUND, **changes}.items() if entry is not None}
    return Metadata(
        round=1,
        names=list(entries),
        dtype_names=[dtype for dtype, _ in entries.values()],
        shapes=[shape for _, shape in entries.values()],
    )


def full_batch():
    return [
        ("embed.weight", torch.arange(8.0).reshape(4, 2)),
        ("norm", torch.tensor([1.5, 2.5, 3.5], dtype=torch.bfloat16)),
        ("steps", torch.tensor(7)),
    ]


# --- check -----------------------------------------------------------------------------------------------------


def test_fitting_round_passes(installer, model):
    """A round that names every parameter once, with its shape and dtype, has a place; nothing is written by asking."""
    assert installer.check(metadata()) == {}
    assert not any(value.any() for value in model.parameters())
    assert installer.abort() is False


@pytest.mark.parametrize(
    ("changes", "param", "text"),
    [
        ({"extra": ("float32", [2])}, "extra", "'extra': the model has none of this name"),
        ({"cache": ("float32", [5])}, "cache", "'cache': the model has none of this name"),
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
    ids=["name", "buffer", "shape", "0-dim", "dtype", "no dtype", "to int", "from int", "ints", "missing", "tied"],
)
def test_round_that_does_not_fit_is_refused(installer, changes, param, text):
    """A name, shape or dtype without a place, and a parameter without a value, are PlanErrors that name the parameter."""
    with pytest.raises(PlanError, match=text) as caught:
        installer.check(metadata(**changes))
    assert (caught.value.param, caught.value.side, caught.value.phase) == (param, "worker", "update")


def test_floating_dtypes_may_differ(installer):
    """Another floating dtype is cast, and the answer names the model's own."""
    changes = {"embed.weight": ("float64", [4, 2]), "norm": ("float8_e4m3fn", [3])}
    assert installer.check(metadata(**changes)) == {"embed.weight": "float32", "norm": "bfloat16"}


def test_tied_parameter_may_come_under_any_of_its_names(installer):
    """Either name of a tied parameter covers both, and both together are no mistake."""
    installer.check(metadata(**{"embed.weight": None, "head.weight": ("float32", [4, 2])}))
    installer.check(metadata(**{"head.weight": ("float32", [4, 2])}))


def test_missing_parameters_pass_with_the_cover_check_off(model):
    """A round that leaves parameters out is taken where that was asked for; what has no place is still refused."""
    installer = ModuleInstaller(model, check_cover=False)
    installer.check(metadata(norm=None))
    with pytest.raises(PlanError, match="none of this name"):
        installer.check(metadata(extra=("float32", [1])))


# --- a round ---------------------------------------------------------------------------------------------------


def test_round_is_written_in_place(installer, model):
    """What is installed is in the model under every tied name, where the model's tensors were."""
    pointers = {name: value.data_ptr() for name, value in model.named_parameters()}
    installer.begin()
    batch = full_batch()
    installer.install(batch[:1])
    installer.install(batch[1:])
    assert installer.finish() == InstallResult(num_parameters=3, not_synced=())
    for name, tensor in batch:
        assert torch.equal(model.get_parameter(name), tensor)
    assert torch.equal(model.head.weight, batch[0][1])
    assert pointers == {name: value.data_ptr() for name, value in model.named_parameters()}
    assert not model.cache.any()


def test_bytes_can_be_copied_into_place(installer, model):
    """A parameter of the dtype that is sent, a scalar too, is written where it is; what was given a place counts as written."""
    installer.begin()
    for name, tensor in full_batch():
        installer.place(name, tensor.dtype).copy_(tensor.reshape(-1).view(torch.uint8))
        assert torch.equal(model.get_parameter(name), tensor)
    assert installer.finish() == InstallResult(num_parameters=3, not_synced=())
    assert installer.abort() is True


@pytest.mark.parametrize("in_place", [True, False])
def test_tied_names_must_come_with_equal_values(installer, model, in_place):
    """Both names of a tied parameter may come if they agree; else what came last would silently win, so it is refused."""
    values = torch.tensor([[1.0, float("nan")]] * 4)
    installer.begin()
    if in_place:
        installer.place("embed.weight", torch.float32).copy_(values.reshape(-1).view(torch.uint8))
        assert installer.place("head.weight", torch.float32) is None
    else:
        installer.install([("embed.weight", values)])
    installer.install([("head.weight", values.clone())])
    with pytest.raises(
        PlanError, match=r"the model ties it to 'embed.weight', the trainer sends other values"
    ) as caught:
        installer.install([("head.weight", values + 1)])
    assert caught.value.param == "head.weight"
    assert model.embed.weight[0, 0] == 1


def test_no_place_where_bytes_would_not_fit(installer, model):
    """Another dtype, or memory with gaps, goes through `install`."""
    installer.begin()
    assert installer.place("norm", torch.float32) is None
    model.embed.weight.data = torch.zeros(2, 4).t()
    assert installer.place("embed.weight", torch.float32) is None
    assert installer.abort() is False


def test_values_are_cast_to_the_models_dtype(installer, model):
    """What comes in another floating dtype is rounded as torch does."""
    values = torch.tensor([1 / 3, 2e5, -1.0], dtype=torch.float64)
    installer.begin()
    installer.install([("norm", values)])
    assert torch.equal(model.norm, values.to(torch.bfloat16))


def test_parameters_that_require_gradients_can_be_written(model):
    """A model that is not frozen takes weights, too, and no graph comes of it."""
    model.norm.requires_grad_()
    installer = ModuleInstaller(model, check_cover=False)
    installer.begin()
    installer.install(full_batch()[1:2])
    assert torch.equal(model.norm, full_batch()[1][1])
    assert model.norm.grad_fn is None


def test_what_was_left_out_is_named(model):
    """With the cover check off, the result names what still holds its old value, under all of its names."""
    installer = ModuleInstaller(model, check_cover=False)
    installer.begin()
    installer.install(full_batch()[1:])
    assert installer.finish() == InstallResult(num_parameters=2, not_synced=("embed.weight", "head.weight"))


def test_abort_says_whether_anything_was_written(installer):
    """False is a promise that no byte changed; after the first tensor it is True, as often as it is asked."""
    assert installer.abort() is False
    installer.begin()
    assert installer.abort() is False
    installer.install([])
    assert installer.abort() is False
    installer.install(full_batch()[:1])
    assert installer.abort() is True
    assert installer.abort() is True


def test_next_round_begins_clean(installer, model):
    """After a round that was aborted in the middle the next one counts for itself."""
    installer.begin()
    installer.install(full_batch()[:1])
    installer.abort()
    installer.begin()
    assert installer.abort() is False
    installer.install(full_batch())
    assert installer.finish() == InstallResult(num_parameters=3, not_synced=())
    assert torch.equal(model.norm, full_batch()[1][1])
