"""What a rank says that its digests are over, and the digests that it then posts."""

import pytest
import torch

from wt_common.digest import digest_bytes
from wt_common.session import Placed
from wt_worker.installers.base import Prepared
from wt_worker.placement.binding import Binding
from wt_worker.placement.plan import NamePlan, Plan
from wt_worker.placement.trace import Target, trace
from wt_worker.shares import Shares

F32, BF16 = torch.float32, torch.bfloat16
VERIFY = ["full", "received", "off"]


def digest_of(tensor):
    """By the definition."""
    return digest_bytes(bytes(tensor.detach().contiguous().reshape(-1).view(torch.uint8).tolist()))


class Rank:
    """A rank's tensors, its plan bound to them, and how it writes what was sent."""

    def __init__(self, load, tensors, rows, *, in_place=None, casts=None):
        self.tensors = tensors

        def load_all(pairs):
            for name, value in pairs:
                load(tensors, name, value)

        targets = [Target(name, "", tensor) for name, tensor in tensors.items()]
        binding = Binding(trace(rows, targets, load_all), tensors, tensors.keys() if in_place is None else in_place)
        self.prepared = Prepared(binding=binding, casts=casts or {}, not_in_place={"packed": ["layer"]})

    def write(self, values):
        for name, value in values.items():
            for landing in self.prepared.binding.landings(name) or ():
                landing.region(landing.copy).copy_(landing.copy.source.of(value.reshape(-1)))

    def shares(self, verify="full"):
        return Shares.of(self.prepared, verify)


def by_name(tensors, name, value):
    tensors[name].copy_(value)


def sharded(index):
    """The loader of rank `index` of 2: rows of one, columns of another, all of a norm, and a bias on the first rank only."""

    def load(tensors, name, value):
        if name == "bias":
            tensors[name].copy_(value if index == 0 else value.zero_())
        elif name == "norm":
            tensors[name].copy_(value)
        else:
            tensors[name].copy_(value.chunk(2, dim=0 if name == "rows" else 1)[index])

    return load


SENT = {
    "rows": torch.arange(12.0).reshape(4, 3),
    "columns": torch.arange(20.0).reshape(2, 10).to(BF16),
    "norm": torch.tensor([1.0, 2.0]),
    "bias": torch.tensor([3.0, 4.0, 5.0]),
}
ROWS = [(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in SENT.items()]


def tp_rank(index):
    shapes = {"rows": (2, 3), "columns": (2, 5), "norm": (2,), "bias": (3,)}
    return Rank(
        sharded(index), {name: torch.zeros(shape, dtype=SENT[name].dtype) for name, shape in shapes.items()}, ROWS
    )


# --- what is taken, and digested -----------------------------------------------------------------------------------------------


def test_what_a_shard_takes():
    """Parts where a rank has parts, the whole where it has all, and nothing where it has nothing."""
    first, second = tp_rank(0).shares(), tp_rank(1).shares()
    assert (first.digested, second.digested) == ("ppww", "ppwn")
    assert (first.takes, second.takes) == ("ppaa", "ppan")
    assert [part[:2] for part in first.parts] == [part[:2] for part in second.parts] == [[0, 6], [1, 10]]


@pytest.mark.parametrize("verify", ["received", "off"])
def test_only_full_verification_looks_at_what_is_installed(verify):
    """Otherwise every digest, if any, is over the bytes that came, on every rank alike; what is taken is told all the same."""
    shares, full = tp_rank(1).shares(verify), tp_rank(1).shares()
    assert shares.digested == "rrrr"
    assert (shares.takes, shares.parts) == (full.takes, full.parts)
    assert shares.received([]) == {0, 1, 2, 3}


def test_what_is_not_in_place_is_digested_as_received():
    """A loader may do anything with it, so what came is all that is known."""
    rank = Rank(
        by_name, {"a": torch.zeros(2), "b": torch.zeros(2)}, [("a", F32, (2,)), ("b", F32, (2,))], in_place=["b"]
    )
    assert rank.shares().digested == "rw"


@pytest.mark.parametrize(
    ("declared", "casts", "kind"),
    [
        (F32, {}, "w"),
        (BF16, {}, "r"),
        (BF16, {"w": "float32"}, "w"),
        (torch.float64, {"w": "float32"}, "w"),
        (F32, {"w": "float64"}, "r"),
    ],
    ids=["same", "cast here", "cast there", "narrowed there", "asked for another"],
)
def test_installed_bytes_count_only_in_the_dtype_that_comes(declared, casts, kind):
    """A parameter that is cast here holds other bytes than were sent; one that the sender casts, as it was asked to, does not."""
    rank = Rank(by_name, {"w": torch.zeros(3)}, [("w", declared, (3,))], casts=casts)
    assert rank.shares().digested == kind


def test_parameter_that_goes_to_one_other_dtype_is_received():
    """Of two places with different dtypes at least one has other bytes than were sent."""

    def load(tensors, name, value):
        for tensor in tensors.values():
            tensor.copy_(value)

    assert (
        Rank(load, {"a": torch.zeros(3), "b": torch.zeros(3, dtype=BF16)}, [("w", F32, (3,))]).shares().digested == "r"
    )


def twice(tensors, name, value):
    tensors["a"].copy_(value)
    tensors["b"].copy_(value)


def halves(tensors, name, value):
    tensors["a"].copy_(value[:2])
    tensors["b"].copy_(value[2:])


def half_twice(tensors, name, value):
    tensors["a"].copy_(value[:2])
    tensors["b"].copy_(value[:2])


def overlap(tensors, name, value):
    tensors["a"].copy_(value[:3])
    tensors["b"].copy_(value[1:])


@pytest.mark.parametrize(
    ("load", "size", "kind", "num_parts"),
    [(halves, 2, "aw", 0), (twice, 4, "ap", 2), (half_twice, 2, "pp", 2), (overlap, 3, "ap", 2)],
    ids=["halves", "twice", "half twice", "overlap"],
)
def test_parts_that_are_each_element_once_are_the_whole(load, size, kind, num_parts):
    """Then their digests add up to the whole's here already; of elements that are here twice each part is told."""
    shares = Rank(load, {"a": torch.zeros(size), "b": torch.zeros(size)}, [("w", F32, (4,))]).shares()
    assert (shares.takes + shares.digested, len(shares.parts)) == (kind, num_parts)


def test_parameter_without_elements():
    """It belongs everywhere, as a whole; its digest is that of no bytes."""
    rank = Rank(by_name, {"w": torch.zeros(0, 3)}, [("w", F32, (0, 3))], in_place=[])
    assert rank.shares().digested == "w"
    assert rank.shares().digests({}, rank.prepared.binding) == [0]


def test_name_that_the_model_ignores():
    """No byte of it belongs here, so there is nothing to digest."""
    rank = Rank(lambda *_: None, {"w": torch.zeros(2)}, [("rotary", F32, (2,))])
    shares = rank.shares()
    assert (shares.takes, shares.digested, shares.digests({}, rank.prepared.binding)) == ("n", "n", [])


# --- the message -----------------------------------------------------------------------------------------------


def test_message():
    """What the session carries is what was found, with the round's number and the layers that are not in place."""
    shares = tp_rank(0).shares()
    message = shares.message(7)
    assert isinstance(message, Placed)
    assert (message.round, message.takes, message.digested) == (7, shares.takes, shares.digested)
    assert message.parts == shares.parts
    assert message.not_in_place == {"packed": ["layer"]}
    assert [place for place, _, _ in message.parts] == [0, 1]


def test_parts_have_the_same_key_where_they_are_the_same_elements():
    """So that a part that several ranks have, as of heads that are replicated, counts once."""
    one, same, other = tp_rank(0).shares().parts, tp_rank(0).shares().parts, tp_rank(1).shares().parts
    assert one == same
    assert not {key for _, _, key in one} & {key for _, _, key in other}


# --- digests ---------------------------------------------------------------------------------------------------


def test_parts_of_two_ranks_add_up_to_the_whole():
    """Each rank's digests are in the order of the metadata and of the parts; the ranks' sums are the sender's numbers."""
    posted = {}
    for index in (0, 1):
        rank = tp_rank(index)
        rank.write(SENT)
        posted[index] = rank.shares().digests({}, rank.prepared.binding)
    sent = {name: digest_of(tensor) for name, tensor in SENT.items()}
    assert [len(digests) for digests in posted.values()] == [4, 3]
    for place, name in enumerate(("rows", "columns")):
        parts = [posted[index][place] for index in (0, 1)]
        assert sum(parts) % (1 << 64) == sent[name]
        assert sent[name] not in parts
    assert [posted[index][2] for index in (0, 1)] == [sent["norm"]] * 2
    assert posted[0][3] == sent["bias"]


def test_received_digests_stand_at_their_places():
    """Those of bytes that came are between those of what is installed, in the order of the metadata."""
    values = {name: torch.randn(3) for name in "abcd"}
    rank = Rank(
        by_name, {name: torch.zeros(3) for name in "abcd"}, [(name, F32, (3,)) for name in "abcd"], in_place=["b", "d"]
    )
    rank.write(values)
    shares = rank.shares()
    assert shares.digested == "rwrw"
    assert shares.received([]) == {0, 2}
    expected = [11, digest_of(values["b"]), 22, digest_of(values["d"])]
    assert shares.digests({0: 11, 2: 22}, rank.prepared.binding) == expected


def test_sender_may_ask_for_received_bytes():
    """A place that `Go.received` lists has one digest, over what came, whatever was said of it: whole, parts or nothing."""
    rank = tp_rank(1)
    rank.write(SENT)
    shares = rank.shares()
    assert shares.digested == "ppwn"
    assert shares.received([0, 2, 3]) == {0, 2, 3}
    plain = shares.digests({}, rank.prepared.binding)
    assert shares.digests({0: 11, 2: 22, 3: 33}, rank.prepared.binding) == [11, plain[1], 22, 33]


def test_whole_in_two_parts_is_one_digest():
    """Parts that are the whole are added up here."""
    rank = Rank(halves, {"a": torch.zeros(2), "b": torch.zeros(2)}, [("w", F32, (4,))])
    value = torch.randn(4)
    rank.write({"w": value})
    assert rank.shares().digests({}, rank.prepared.binding) == [digest_of(value)]


def test_each_part_has_a_digest_in_the_order_told():
    """The parts in the message and their digests correspond one by one."""
    rank = Rank(overlap, {"a": torch.zeros(3), "b": torch.zeros(3)}, [("w", F32, (4,))])
    value = torch.randn(4)
    rank.write({"w": value})
    shares = rank.shares()
    first, second = value.clone(), value.clone()
    first[3] = second[0] = 0
    assert shares.digests({}, rank.prepared.binding) == [digest_of(first), digest_of(second)]
    assert [count for _, count, _ in shares.parts] == [3, 3]


def test_parts_that_overlap_and_leave_something_out_are_one():
    """Their sizes would add up to the whole; what is told is the number of elements that are taken."""

    def load(tensors, _, value):
        tensors["a"].copy_(value[:4])
        tensors["b"].copy_(value[2:6])

    shares = Rank(load, {"a": torch.zeros(4), "b": torch.zeros(4)}, [("w", F32, (8,))]).shares()
    assert (shares.takes, shares.digested) == ("p", "r")
    assert [part[:2] for part in shares.parts] == [[0, 6]]


@pytest.mark.parametrize("verify", VERIFY)
def test_plan_of_nothing(verify):
    """A round without parameters has no digests."""
    prepared = Prepared(binding=Binding(Plan((), ()), {}, ()))
    shares = Shares.of(prepared, verify)
    assert (shares.digested, shares.parts, shares.digests({}, prepared.binding)) == ("", [], [])


def test_unplanned_name_is_received():
    """A name with a problem has no landings, and its bytes go to the loader."""
    plan = Plan((NamePlan("w", "float32", (2,), (), "aten.exp"),), ())
    shares = Shares.of(Prepared(binding=Binding(plan, {}, ())), "full")
    assert (shares.takes, shares.digested) == ("u", "r")


def test_what_is_not_synced_is_told():
    """With it, what of it has had random values since the server's start, and which names share memory, by their places."""
    rank = Rank(by_name, {"a": torch.zeros(2)}, [("a", F32, (2,)), ("b", F32, (2,))][:1])
    prepared = Prepared(binding=rank.prepared.binding, not_synced=("x", "y"), tied={"a": "a"})
    message = Shares.of(prepared, "full", unset={"y", "z"}).message(1)
    assert (message.not_synced, message.unset, message.tied) == (["x", "y"], ["y"], [[0, 0]])
