"""Taking groups of bytes apart: into place, or into whole tensors for an installer, which is a fake here."""

from math import prod

import pytest
import torch

from wt_common.digest import digest_bytes
from wt_common.packing import plan_groups
from wt_common.session import Metadata
from wt_worker.placement.binding import Landing
from wt_worker.placement.inbox import Arrival
from wt_worker.placement.plan import Box, Copy
from wt_worker.placement.writer import RoundWriter, WriterCache

MANY_PIECES = 4096
DTYPE_NAMES = (
    *("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e8m0fnu"),
    *("int64", "int32", "int16", "int8", "uint64", "uint32", "uint16", "uint8", "bool", "complex64", "complex128"),
)
F32 = torch.float32


def some_tensor(dtype, shape, seed=0):
    """A tensor of random bytes, which is any value of its dtype, NaNs included."""
    generator = torch.Generator().manual_seed(seed)
    flat = torch.randint(2 if dtype == torch.bool else 256, (prod(shape) * dtype.itemsize,), generator=generator)
    return flat.to(torch.uint8).view(dtype).reshape(shape)


def bytes_of(tensor):
    """The tensor's bytes; two that are NaN are compared so, too."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def digest_of(tensor):
    """By the definition."""
    return digest_bytes(bytes(bytes_of(tensor).tolist()))


def assert_same(tensor, expected):
    """Same dtype, shape and bytes."""
    assert (tensor.dtype, tensor.shape) == (expected.dtype, expected.shape)
    assert torch.equal(bytes_of(tensor), bytes_of(expected))


class FakeInstaller:
    """Knows the landings that a test gives it, by name, and remembers what it was asked and given."""

    def __init__(self, **places):
        self.route_id = 1
        self.places = places
        self.asked = []
        self.installed = []
        self.num_touched = 0
        self.on_touch = lambda: None

    def landings(self, name):
        self.asked.append(name)
        return self.places.get(name)

    def touch(self):
        self.on_touch()
        self.num_touched += 1

    def install(self, batch):
        assert batch, "an empty batch"
        self.installed += batch


class Stream:
    """Rounds of one session: buffers that are used over and over, the groups, and the writers' cache."""

    def __init__(self, installer, *, max_bytes=1 << 12, max_pieces=MANY_PIECES, num_buffers=1):
        self.installer = installer
        self.max_bytes = max_bytes
        self.max_pieces = max_pieces
        self.cache = WriterCache()
        self.buffers = [torch.empty(max_bytes, dtype=torch.uint8) for _ in range(num_buffers)]

    def writer(self, tensors, *, digested=(), metadata_digest="m"):
        metadata = Metadata(
            round=1,
            names=list(tensors),
            dtype_names=[str(tensor.dtype).rpartition(".")[2] for tensor in tensors.values()],
            shapes=[list(tensor.shape) for tensor in tensors.values()],
        )
        return RoundWriter(
            metadata,
            metadata_digest,
            [tensor.dtype for tensor in tensors.values()],
            self.installer,
            cut_bytes=self.max_bytes,
            cache=self.cache,
            digested=frozenset(digested),
        )

    def groups(self, tensors):
        sizes = [tensor.nbytes for tensor in tensors.values()]
        return plan_groups(sizes, max_bytes=self.max_bytes, max_pieces=self.max_pieces)

    def feed(self, writer, tensors):
        """All groups have been taken, each out of a buffer that holds something else before, between and after."""
        values = [bytes_of(tensor) for tensor in tensors.values()]
        for number, group in enumerate(self.groups(tensors)):
            buffer = self.buffers[number % len(self.buffers)].fill_(0xEE)
            for piece in group.pieces:
                buffer[piece.offset : piece.offset + piece.num_bytes] = values[piece.index][piece.start :][
                    : piece.num_bytes
                ]
            writer.take(group, Arrival.staged(group, buffer), number)
            buffer.fill_(0xEE)

    def round(self, tensors, **options):
        """A whole round; returned is its writer."""
        writer = self.writer(tensors, **options)
        self.feed(writer, tensors)
        writer.finish()
        return writer


def box(view, whole=None):
    offset = 0 if whole is None else whole.storage_offset()
    return Box(view.storage_offset() - offset, tuple(view.shape), view.stride())


def lands(target, source, destination=None):
    """A landing of `source`, a view of a checkpoint tensor, in `destination`, a view of `target` (else in all of it)."""
    destination = target if destination is None else destination
    assert source.shape == destination.shape
    return Landing(Copy(box(source), "w", box(destination, target)).normalized(), target)


def whole(tensor):
    """Where all of a checkpoint tensor that looks like `tensor` lands, and the landing."""
    target = torch.zeros_like(tensor)
    return target, (lands(target, torch.empty_like(tensor)),)


# --- to whole tensors ------------------------------------------------------------------------------------------


def assemble(tensors, max_bytes, max_pieces=MANY_PIECES):
    """Every (name, tensor) that was installed, in order; and in how many groups they came."""
    stream = Stream(FakeInstaller(), max_bytes=max_bytes, max_pieces=max_pieces)
    stream.round(tensors)
    assert stream.installer.num_touched == 0, "the installer itself knows that it was given something"
    return stream.installer.installed, len(stream.groups(tensors))


@pytest.mark.parametrize("dtype_name", DTYPE_NAMES)
@pytest.mark.parametrize("max_bytes", [64, 100, 1 << 16])
def test_every_dtype_arrives_as_it_was(dtype_name, max_bytes):
    """Bytes come out as they went in, for any dtype and shape, through buffers that hold all of it or parts."""
    dtype = getattr(torch, dtype_name)
    shapes = [(5, 7), (), (129,), (1,), (2, 3, 4)]
    tensors = {f"p{index}": some_tensor(dtype, shape, index) for index, shape in enumerate(shapes)}
    installed, _ = assemble(tensors, max_bytes)
    assert [name for name, _ in installed] == list(tensors)
    for name, tensor in installed:
        assert_same(tensor, tensors[name])


@pytest.mark.parametrize("max_bytes", [1, 3, 64, 101, 256])
def test_parameter_that_is_cut_comes_once_and_whole(max_bytes):
    """A parameter larger than a group is complete with its last piece, wherever the cuts fall, in the middle of elements too."""
    tensors = {"small": some_tensor(torch.int8, (3,)), "large": some_tensor(F32, (64,), 1)}
    tensors["last"] = some_tensor(torch.bfloat16, (5,), 2)
    installed, num_groups = assemble(tensors, max_bytes)
    assert num_groups > 1
    assert [name for name, _ in installed] == list(tensors)
    for name, tensor in installed:
        assert_same(tensor, tensors[name])


def test_mixed_dtypes_share_a_group():
    """Odd sizes and wide elements side by side are all aligned in one buffer."""
    dtypes = [torch.int8, torch.float64, torch.bool, torch.complex128, torch.bfloat16]
    tensors = {f"p{index}": some_tensor(dtype, (3,), index) for index, dtype in enumerate(dtypes)}
    installed, num_groups = assemble(tensors, 1 << 12)
    assert num_groups == 1
    assert len(installed) == len(tensors)
    for name, tensor in installed:
        assert_same(tensor, tensors[name])


def test_one_piece_per_group():
    """Where nothing is packed every parameter is a group of its own."""
    tensors = {f"p{index}": some_tensor(F32, (index + 1,), index) for index in range(4)}
    installed, num_groups = assemble(tensors, 1 << 12, max_pieces=1)
    assert num_groups == 4
    assert [name for name, _ in installed] == list(tensors)


def test_parameters_own_their_memory():
    """What was handed out stays as it is when its group's buffer is used again, and when a neighbour is written into."""
    tensors = {f"p{index}": some_tensor(F32, (4,), index) for index in range(3)}
    installed, num_groups = assemble(tensors, 1 << 12)
    assert num_groups == 1
    assert len({tensor.untyped_storage().data_ptr() for _, tensor in installed}) == 3
    installed[1][1].fill_(7)
    assert_same(installed[0][1], tensors["p0"])
    assert_same(installed[2][1], tensors["p2"])


def test_empty_parameters_come_at_the_end():
    """A parameter without elements is in no group, and still comes with its dtype and shape; in place there is nothing to do."""
    tensors = {
        "none": torch.empty(0, 3, dtype=torch.bfloat16),
        "some": some_tensor(torch.int32, (2,)),
        "placed": torch.empty(0),
        "nil": torch.empty(2, 0, 5, dtype=torch.float64),
    }
    stream = Stream(FakeInstaller(placed=()), max_bytes=64)
    writer = stream.writer(tensors)
    stream.feed(writer, tensors)
    assert [name for name, _ in stream.installer.installed] == ["some"]
    writer.finish()
    assert [name for name, _ in stream.installer.installed] == ["some", "none", "nil"]
    for name, tensor in stream.installer.installed:
        assert_same(tensor, tensors[name])
    assert writer.sizes == [0, 8, 0, 0]


# --- into place ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype_name", DTYPE_NAMES)
@pytest.mark.parametrize("max_bytes", [1, 6, 24, 64, 1 << 12])
def test_whole_parameter_is_written_in_place(dtype_name, max_bytes):
    """From one group or several, also where a cut is within an element, the bytes are in the landing and nothing is installed."""
    tensors = {"before": some_tensor(torch.int8, (3,)), "w": some_tensor(getattr(torch, dtype_name), (5, 3), 1)}
    target, places = whole(tensors["w"])
    stream = Stream(FakeInstaller(w=places), max_bytes=max_bytes)
    stream.round(tensors)
    assert_same(target, tensors["w"])
    assert [name for name, _ in stream.installer.installed] == ["before"]
    assert stream.installer.num_touched > 0


@pytest.mark.parametrize("max_bytes", [64, 100, 1 << 12])
def test_parameter_without_a_landing_is_dropped(max_bytes):
    """What has no place on this rank costs nothing: it is not written, not installed, and the model is not touched."""
    stream = Stream(FakeInstaller(w=()), max_bytes=max_bytes)
    writer = stream.round({"w": some_tensor(F32, (40,))})
    assert (stream.installer.installed, stream.installer.num_touched) == ([], 0)
    assert writer.sizes == [160]


def shard(checkpoint, target):
    yield checkpoint[4:], target


def columns(checkpoint, target):
    yield checkpoint[:, 3:], target


def transposed(checkpoint, target):
    yield checkpoint.t(), target


def transposed_there(checkpoint, target):
    yield checkpoint, target.t()


def every_other_row(checkpoint, target):
    yield checkpoint[1::2], target


def into_a_part(checkpoint, target):
    yield checkpoint, target[2:10, 1:7]


def taken_apart(checkpoint, target):
    heads = checkpoint.view(2, 4, 6)
    yield heads[:, :3], target[:6].view(2, 3, 6)
    yield heads[:, 3:], target[6:].view(2, 1, 6)


def twice(checkpoint, target):
    yield checkpoint, target[:8]
    yield checkpoint, target[8:]


WAYS = {
    shard: (4, 6),
    columns: (8, 3),
    transposed: (6, 8),
    transposed_there: (6, 8),
    every_other_row: (4, 6),
    into_a_part: (11, 9),
    taken_apart: (8, 6),
    twice: (16, 6),
}


@pytest.mark.parametrize("max_bytes", [4, 6, 20, 64, 1 << 12])
@pytest.mark.parametrize("dtypes", [(F32, F32), (torch.bfloat16, F32), (torch.float64, torch.bfloat16)], ids=str)
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_landings_of_every_kind(way, dtypes, max_bytes):
    """Shards, strided and transposed boxes, several of them, cast or not, hold what torch's own copy puts there, and no more."""
    sent, held = dtypes
    checkpoint = torch.randn((8, 6), generator=torch.Generator().manual_seed(1)).to(sent)
    target, expected = (torch.full(WAYS[way], 77, dtype=held) for _ in range(2))
    for source, destination in way(checkpoint, expected):
        destination.copy_(source)
    places = tuple(lands(target, *pair) for pair in way(torch.empty_like(checkpoint), target))
    stream = Stream(FakeInstaller(w=places), max_bytes=max_bytes, num_buffers=2)
    stream.round({"first": some_tensor(torch.int8, (3,)), "w": checkpoint})
    assert_same(target, expected)
    assert [name for name, _ in stream.installer.installed] == ["first"]


def programs(writer):
    """What the writer does with each group, by number and buffer."""
    return writer._programs


def runs(program):
    """Bytes that each of its contiguous copies writes, and reads."""
    to, of = [*program.words_to, *program.runs_to], [*program.words_from, *program.runs_from]
    return [(one.nbytes, other.nbytes) for one, other in zip(to, of, strict=True)]


def fused(sizes, target):
    """Landings of parameters of `sizes` one behind the other in `target`."""
    places, start = {}, 0
    for index, size in enumerate(sizes):
        places[f"p{index}"] = (lands(target, torch.empty(size), target[start : start + size]),)
        start += size
    return places


def test_neighbours_are_one_copy():
    """Parameters that lie side by side in the buffer and land side by side are joined into a single run of bytes."""
    target = torch.zeros(64)
    stream = Stream(FakeInstaller(**fused([16, 32, 16], target)))
    tensors = {f"p{index}": some_tensor(F32, (size,), index) for index, size in enumerate([16, 32, 16])}
    writer = stream.round(tensors)
    (program,) = programs(writer).values()
    assert runs(program) == [(256, 256)]
    assert program.others == []
    assert_same(target, torch.cat([*tensors.values()]))


@pytest.mark.parametrize(
    ("sizes", "num_runs"), [([3, 16, 16], 2), ([16, 3, 16], 2), ([16, 16, 3], 1), ([3, 3, 3], 3)], ids=str
)
def test_padding_in_the_buffer_ends_a_run(sizes, num_runs):
    """A piece that does not fill its 64 bytes is followed by a gap, which must not be copied."""
    target = torch.zeros(sum(sizes) + 4)
    stream = Stream(FakeInstaller(**fused(sizes, target)))
    tensors = {f"p{index}": some_tensor(F32, (size,), index) for index, size in enumerate(sizes)}
    (program,) = programs(stream.round(tensors)).values()
    assert len(runs(program)) == num_runs
    assert_same(target, torch.cat([*tensors.values(), torch.zeros(4)]))


def test_gap_in_the_model_ends_a_run():
    """What lands in another tensor, in another order or with a gap between is a copy of its own."""
    one, other = torch.zeros(100), torch.zeros(16)
    places = {
        "p0": (lands(one, torch.empty(16), one[32:48]),),
        "p1": (lands(one, torch.empty(16), one[16:32]),),
        "p2": (lands(one, torch.empty(16), one[50:66]),),
        "p3": (lands(other, torch.empty(16)),),
    }
    stream = Stream(FakeInstaller(**places))
    tensors = {f"p{index}": some_tensor(F32, (16,), index) for index in range(4)}
    (program,) = programs(stream.round(tensors)).values()
    assert len(runs(program)) == 4
    for name, region in (("p0", one[32:48]), ("p1", one[16:32]), ("p2", one[50:66]), ("p3", other)):
        assert_same(region, tensors[name])


# --- programs --------------------------------------------------------------------------------------------------


def test_programs_are_used_again():
    """In the next round of the same parameters nothing is asked or planned anew, and the new bytes arrive all the same."""
    tensors = {"w": some_tensor(F32, (40,), 1), "x": some_tensor(torch.int8, (5,), 2)}
    target, places = whole(tensors["w"])
    stream = Stream(FakeInstaller(w=places), max_bytes=64, num_buffers=2)
    first = stream.round(tensors)
    made = dict(programs(first))
    assert len(made) == 4
    stream.installer.asked.clear()
    other = {"w": some_tensor(F32, (40,), 3), "x": some_tensor(torch.int8, (5,), 4)}
    second = stream.round(other)
    assert programs(second) == made
    assert all(programs(second)[key] is program for key, program in made.items())
    assert stream.installer.asked == ["x"], "only who takes assembled bytes is asked again"
    assert_same(target, other["w"])
    assert_same(dict(stream.installer.installed[1:])["x"], other["x"])


def test_each_buffer_has_programs_of_its_own():
    """Which buffer a group comes in may change from round to round."""
    tensors = {"w": some_tensor(F32, (40,))}
    target, places = whole(tensors["w"])
    stream = Stream(FakeInstaller(w=places), max_bytes=64, num_buffers=2)
    stream.round(tensors)
    stream.buffers.reverse()
    target.zero_()
    writer = stream.round(tensors)
    assert len(programs(writer)) == 6
    assert_same(target, tensors["w"])


def change_route(stream, tensors, options):
    stream.installer.route_id += 1


def change_dtypes(stream, tensors, options):
    tensors["w"] = tensors["w"].to(torch.bfloat16)


def change_digested(stream, tensors, options):
    options["digested"] = (0,)


def change_metadata(stream, tensors, options):
    options["metadata_digest"] = "other"


def change_cut(stream, tensors, options):
    stream.max_bytes = 32


def change_installer(stream, tensors, options):
    stream.installer = FakeInstaller(**stream.installer.places)


def clear_cache(stream, tensors, options):
    stream.cache.clear()


@pytest.mark.parametrize(
    "change",
    [change_route, change_dtypes, change_digested, change_metadata, change_cut, change_installer, clear_cache],
    ids=lambda change: change.__name__,
)
def test_programs_are_made_anew(change):
    """Whatever a program depends on makes new ones when it changes; the old ones, and the buffers in them, are let go."""
    tensors, options = {"w": torch.randn(40)}, {}
    target, places = whole(tensors["w"])
    stream = Stream(FakeInstaller(w=places), max_bytes=64)
    old = dict(programs(stream.round(tensors)))
    change(stream, tensors, options)
    stream.installer.asked.clear()
    new = programs(stream.round(tensors, **options))
    assert stream.installer.asked
    assert not {id(program) for program in old.values()} & {id(program) for program in new.values()}
    assert torch.equal(target, tensors["w"].to(F32))


# --- digests ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_bytes", [1, 3, 37, 64, 1 << 12])
@pytest.mark.parametrize("in_place", [True, False], ids=["in place", "installed"])
def test_received_bytes_are_digested(max_bytes, in_place):
    """The digest of a parameter is that of its bytes as they were sent, also where it comes in pieces that cut a word."""
    tensors = {
        "odd": some_tensor(torch.int8, (7,), 1),
        "cut": some_tensor(torch.bfloat16, (75,), 2),
        "none": torch.empty(0),
        "left": some_tensor(F32, (5,), 3),
        "last": some_tensor(torch.float64, (9,), 4),
    }
    places = {name: whole(tensor)[1] for name, tensor in tensors.items()} if in_place else {}
    stream = Stream(FakeInstaller(**places), max_bytes=max_bytes)
    for seed in (0, 10):
        tensors = {name: some_tensor(tensor.dtype, tensor.shape, seed) for name, tensor in tensors.items()}
        writer = stream.writer(tensors, digested=(0, 1, 2, 4))
        stream.feed(writer, tensors)
        writer.finish()
        values = list(tensors.values())
        assert writer.received == {index: digest_of(values[index]) for index in (0, 1, 2, 4)}


def test_digest_is_over_what_came_and_not_over_what_it_became():
    """Where a landing casts, the received bytes are still those on the wire; a part that lands nowhere counts, too."""
    sent = torch.randn(4, 6)
    target = torch.zeros(2, 6, dtype=torch.bfloat16)
    stream = Stream(FakeInstaller(w=(lands(target, torch.empty(4, 6)[2:]),)), max_bytes=32)
    writer = stream.round({"w": sent}, digested=(0,))
    assert writer.received == {0: digest_of(sent)}
    assert torch.equal(target, sent[2:].to(torch.bfloat16))


# --- touching --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_bytes", [6, 20, 1 << 12], ids=["assembled", "cut", "one group"])
@pytest.mark.parametrize("cast", [False, True], ids=["run", "cast"])
def test_installer_hears_before_the_first_write(max_bytes, cast):
    """When the installer is told that landings are about to be written, not one of them has been."""
    sent = torch.randn(10).to(torch.float64 if cast else F32)
    target = torch.zeros(10)
    installer = FakeInstaller(w=(lands(target, torch.empty(10)),))
    seen = []
    installer.on_touch = lambda: seen.append(bool(target.any()))
    Stream(installer, max_bytes=max_bytes).round({"w": sent})
    assert seen[0] is False
    assert torch.equal(target, sent.to(F32))


def test_installer_does_not_hear_before_anything_is_written():
    """Bytes that wait for the rest of their element or tensor, or belong nowhere, leave the model as it was."""
    tensors = {"nowhere": torch.randn(4), "loaded": torch.randn(40), "placed": torch.randn(4)}
    _, places = whole(tensors["placed"])
    stream = Stream(FakeInstaller(nowhere=(), placed=places), max_bytes=64, max_pieces=1)
    writer = stream.writer(tensors, digested=(0, 1, 2))
    groups = stream.groups(tensors)
    for number, group in enumerate(groups[:-1]):
        writer.take(group, Arrival.staged(group, stream.buffers[0]), number)
        assert stream.installer.num_touched == 0, group
        assert bool(stream.installer.installed) is (number == len(groups) - 2), group
    writer.take(groups[-1], Arrival.staged(groups[-1], stream.buffers[0]), len(groups) - 1)
    assert stream.installer.num_touched == 1


def test_pieces_of_a_cut_element_are_written_when_it_is_whole():
    """Where cuts are within elements, the parameter waits in memory of its own, untouched until its last byte is there."""
    sent = torch.randn(5)
    target, places = whole(sent)
    stream = Stream(FakeInstaller(w=places), max_bytes=6)
    writer = stream.writer({"w": sent})
    groups = stream.groups({"w": sent})
    for number, group in enumerate(groups):
        assert (stream.installer.num_touched, bool(target.any())) == (0, False)
        (piece,) = group.pieces
        stream.buffers[0][: piece.num_bytes] = bytes_of(sent)[piece.start :][: piece.num_bytes]
        writer.take(group, Arrival.staged(group, stream.buffers[0]), number)
    assert (stream.installer.num_touched, stream.installer.installed) == (1, [])
    assert torch.equal(target, sent)
