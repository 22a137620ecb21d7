"""A plan as data: boxes of elements, copies and their parts, and what is written how."""

import dataclasses
import json
import subprocess
import sys
from itertools import pairwise
from math import prod

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from wt_worker.placement.plan import Box, Copy, Fill, NamePlan, ParameterPlan, Plan, count_elements, row_major


def elements(box):
    """The places of its elements in the flat tensor, in its order."""
    if 0 in box.shape:
        return []
    return box.of(torch.arange(box.offset + box.span)).reshape(-1).tolist()


def pairs(copy):
    """Where each element goes, by the definition."""
    return list(zip(elements(copy.source), elements(copy.destination), strict=True))


# --- boxes -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "strides"), [((), ()), ((3,), (1,)), ((2, 3, 4), (12, 4, 1)), ((2, 0, 3), (3, 3, 1)), ((1, 1), (1, 1))]
)
def test_row_major_is_what_torch_calls_contiguous(shape, strides):
    """The strides of a new tensor, of one without elements too."""
    assert row_major(shape) == strides == torch.empty(shape).stride()


def test_box_of_a_tensor():
    """Offset, shape and strides count in elements of the flat tensor, wherever that begins in its storage."""
    flat = torch.arange(20)[4:]
    box = Box(3, (2, 3), (5, 2))
    assert box.of(flat).tolist() == [[7, 9, 11], [12, 14, 16]]
    assert (box.num_elements, box.span) == (6, 10)
    assert elements(box) == [3, 5, 7, 8, 10, 12]


@pytest.mark.parametrize(
    ("box", "num_elements", "span", "is_run"),
    [
        (Box(7, (), ()), 1, 1, True),
        (Box(7, (1,), (1,)), 1, 1, True),
        (Box(7, (1,), (9,)), 1, 1, True),
        (Box(7, (5,), (1,)), 5, 5, True),
        (Box(7, (5,), (2,)), 5, 9, False),
        (Box(7, (2, 3), (3, 1)), 6, 6, False),
        (Box(7, (2, 3), (1, 2)), 6, 6, False),
        (Box(7, (0,), (1,)), 0, 0, True),
        (Box(7, (2, 0), (1, 1)), 0, 0, False),
    ],
    ids=str,
)
def test_what_a_box_says_of_itself(box, num_elements, span, is_run):
    """Elements, reach, and whether it is one run as it is written; a copy is brought to that form before it is asked."""
    assert (box.num_elements, box.span, box.is_run) == (num_elements, span, is_run)


def test_box_of_all_elements():
    """The whole tensor is one run, whatever its shape."""
    assert Box.whole((2, 3, 4)) == Box(0, (24,), (1,))
    assert Box.whole(()) == Box(0, (1,), (1,))
    assert Box.whole((2, 0)) == Box(0, (0,), (1,))


def test_key_is_the_same_in_every_process():
    """It names the box on the wire, so it depends on nothing but the box, and fits what JSON readers take for an integer."""
    box = Box(3, (2, 3), (5, 2))
    code = "from wt_worker.placement.plan import Box; print(Box(3, (2, 3), (5, 2)).key)"
    other = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, env={"PYTHONPATH": ":".join(sys.path)}
    )
    assert int(other.stdout) == box.key
    others = [Box(4, (2, 3), (5, 2)), Box(3, (3, 2), (5, 2)), Box(3, (2, 3), (2, 5)), Box(3, (6,), (1,))]
    keys = {each.key for each in [box, *others]}
    assert len(keys) == 5
    assert all(0 <= key < 1 << 62 for key in keys)


# --- copies ----------------------------------------------------------------------------------------------------


@st.composite
def copies(draw):
    """A copy between two boxes of one shape, each element of a box at a place of its own."""
    shape = tuple(draw(st.lists(st.integers(1, 5), max_size=4)))

    def box():
        order, strides, step = draw(st.permutations(range(len(shape)))), [0] * len(shape), draw(st.integers(1, 3))
        for dim in order:
            strides[dim] = step
            step = step * shape[dim] + draw(st.sampled_from([0, 0, 1, 5]))
        return Box(draw(st.integers(0, 9)), shape, tuple(strides))

    return Copy(box(), "w", box())


@given(copies())
def test_normalized_copy_moves_the_same(copy):
    """Each element goes where it went, in the same order, in no more dimensions; doing it again changes nothing."""
    normalized = copy.normalized()
    assert pairs(normalized) == pairs(copy)
    assert len(normalized.source.shape) <= max(1, len(copy.source.shape))
    assert normalized.source.shape == normalized.destination.shape
    assert normalized.normalized() == normalized
    assert normalized.parameter == "w"


@pytest.mark.parametrize(
    ("source", "destination", "expected"),
    [
        (Box(0, (4, 6), (6, 1)), Box(8, (4, 6), (6, 1)), ((24,), (1,), (1,))),
        (Box(0, (4, 6), (6, 1)), Box(8, (4, 6), (8, 1)), ((4, 6), (6, 1), (8, 1))),
        (Box(0, (4, 1, 6), (6, 99, 1)), Box(8, (4, 1, 6), (6, 77, 1)), ((24,), (1,), (1,))),
        (Box(0, (4, 6), (1, 4)), Box(8, (4, 6), (1, 4)), ((4, 6), (1, 4), (1, 4))),
        (Box(0, (2, 3, 4), (24, 8, 2)), Box(0, (2, 3, 4), (12, 4, 1)), ((24,), (2,), (1,))),
        (Box(5, (), ()), Box(6, (), ()), ((1,), (1,), (1,))),
        (Box(5, (1, 1), (7, 3)), Box(6, (1, 1), (1, 1)), ((1,), (1,), (1,))),
    ],
    ids=["rows", "rows with gaps", "dimension of one", "columns", "strided", "scalar", "one element"],
)
def test_normal_form(source, destination, expected):
    """What is one run on both sides is one dimension; what is not, keeps those that both sides need."""
    copy = Copy(source, "w", destination).normalized()
    assert (copy.source.shape, copy.source.strides, copy.destination.strides) == expected
    assert (copy.source.offset, copy.destination.offset) == (source.offset, destination.offset)


@given(copies(), st.data())
def test_clip_keeps_what_is_in_the_range(copy, data):
    """The parts have each source element in the range once, going where it went, and none that is outside."""
    reach = copy.source.offset + copy.source.span
    start = data.draw(st.integers(0, reach + 2), label="start")
    stop = data.draw(st.integers(start, reach + 3), label="stop")
    parts = list(copy.clip(start, stop))
    found = [pair for part in parts for pair in pairs(part)]
    assert sorted(found) == sorted(pair for pair in pairs(copy) if start <= pair[0] < stop)
    assert all(part.source.num_elements for part in parts), "an empty part"
    assert {part.parameter for part in parts} <= {"w"}


@given(copies(), st.lists(st.integers(0, 200), max_size=6))
def test_clips_of_a_partition_are_the_whole(copy, cuts):
    """However a parameter is cut, its pieces together bring each element once."""
    bounds = sorted([0, *cuts, copy.source.offset + copy.source.span])
    parts = [part for start, stop in pairwise(bounds) for part in copy.clip(start, stop)]
    assert sorted(pair for part in parts for pair in pairs(part)) == sorted(pairs(copy))


def test_clip_cuts_whole_rows_together():
    """Rows that are in the range as a whole are one part, so that a large group is a few copies; those at its edges are cut."""
    copy = Copy(Box(0, (100, 6), (8, 1)), "w", Box(0, (100, 6), (6, 1)))
    assert list(copy.clip(0, 800)) == [copy]
    first, rows, last = copy.clip(11, 84)
    assert first.source == Box(11, (1, 3), (8, 1))
    assert rows == Copy(Box(16, (8, 6), (8, 1)), "w", Box(12, (8, 6), (6, 1)))
    assert last.source == Box(80, (1, 4), (8, 1))
    assert list(copy.clip(6, 8)) == []


# --- counting --------------------------------------------------------------------------------------------------


@given(st.lists(copies().map(lambda copy: copy.source), max_size=5))
def test_elements_are_counted_once(boxes):
    """Elements that are in several boxes, or in one box twice, count once."""
    assert count_elements(boxes) == len({place for box in boxes for place in elements(box)})


@pytest.mark.parametrize(
    ("boxes", "count"),
    [
        ([], 0),
        ([Box(5, (0,), (1,))], 0),
        ([Box(0, (4,), (0,))], 1),
        ([Box(0, (3, 3), (1, 1))], 5),
        ([Box(0, (4,), (2,)), Box(1, (4,), (2,))], 8),
        ([Box(0, (4,), (1,)), Box(3, (4,), (1,))], 7),
        ([Box(10**9, (4,), (1,)), Box(0, (4,), (1,))], 8),
    ],
    ids=["nothing", "empty", "one place", "overlap in itself", "interleaved", "overlap", "far apart"],
)
def test_counting_boxes_that_overlap(boxes, count):
    """Interleaved, overlapping, or one element several times over."""
    assert count_elements(boxes) == count


# --- plans -----------------------------------------------------------------------------------------------------


def parameter(name, *shape, dtype_name="float32", **fields):
    """The plan of a contiguous parameter."""
    layer = name.rpartition(".")[0]
    return ParameterPlan(name, layer, dtype_name, shape, row_major(shape), prod(shape), **fields)


def name_of(name, shape, *copies, **fields):
    return NamePlan(name, fields.pop("dtype_name", "float32"), shape, tuple(copies), **fields)


def run(parameter, source, destination, length):
    return Copy(Box(source, (length,), (1,)), parameter, Box(destination, (length,), (1,)))


def plan_of(*names, parameters, fills=()):
    return Plan(tuple(names), tuple(parameters), tuple(fills))


WHOLE = name_of("a", (6,), run("w", 0, 0, 6))


@pytest.mark.parametrize(
    ("names", "fills", "problem"),
    [
        ([WHOLE], [], None),
        ([name_of("a", (2,), run("w", 0, 0, 2)), name_of("b", (4,), run("w", 0, 2, 4))], [], None),
        ([name_of("a", (4,), run("w", 0, 0, 4))], [Fill("w", Box(4, (2,), (1,)), 0.0)], None),
        ([name_of("a", (4,), run("w", 0, 0, 4))], [], "4 of 6 elements are written"),
        ([WHOLE, name_of("b", (2,), run("w", 0, 4, 2))], [], "elements are written twice, by a, b"),
        ([WHOLE, name_of("b", (6,), run("w", 0, 0, 6))], [], "elements are written twice, by a, b"),
        ([WHOLE], [Fill("w", Box(5, (1,), (1,)), 0.0)], "elements are written twice, by a"),
        ([name_of("a", (6,), run("w", 0, 0, 3), run("w", 3, 2, 3))], [], "elements are written twice, by a"),
        (
            [name_of("a", (6,), Copy(Box(0, (2, 3), (3, 1)), "w", Box(0, (2, 3), (1, 2))))],
            [],
            None,
        ),
        ([name_of("a", (1,), run("w", 0, 9, 1))], [], "1 of 6 elements are written"),
    ],
    ids=[
        "whole",
        "fused",
        "filled",
        "gap",
        "overlap",
        "the same twice",
        "filled twice",
        "own overlap",
        "transposed",
        "few",
    ],
)
def test_cover(names, fills, problem):
    """A parameter is covered if each element is written exactly once; else the text says what is wrong and by whom."""
    assert plan_of(*names, parameters=[parameter("w", 6)], fills=fills).cover == {"w": problem}


def test_cover_leaves_out_what_nobody_writes():
    """A parameter that no name goes to is not uncovered, but untouched."""
    plan = plan_of(WHOLE, parameters=[parameter("w", 6), parameter("x", 2)])
    assert plan.cover == {"w": None}
    assert plan.kind("x") == "untouched"


STRIDED = name_of("a", (2, 6), Copy(Box(0, (2, 3), (6, 1)), "w", Box(0, (2, 3), (3, 1))))
PADDING = Fill("w", Box(4, (2,), (1,)), 0.0)


@pytest.mark.parametrize(
    ("kind", "names", "fills", "fields"),
    [
        ("whole", [WHOLE], [], {}),
        ("whole+cast", [dataclasses.replace(WHOLE, dtype_name="bfloat16")], [], {}),
        ("contiguous", [name_of("a", (12,), run("w", 6, 0, 6))], [], {}),
        ("contiguous", [name_of("a", (3,), run("w", 0, 0, 3)), name_of("b", (3,), run("w", 0, 3, 3))], [], {}),
        ("contiguous+filled", [name_of("a", (4,), run("w", 0, 0, 4))], [PADDING], {}),
        ("contiguous+filled+cast", [name_of("a", (4,), run("w", 0, 0, 4), dtype_name="float16")], [PADDING], {}),
        ("contiguous+filled", [], [Fill("w", Box(0, (6,), (1,)), 1.0)], {}),
        ("strided", [STRIDED], [], {}),
        ("strided+cast", [dataclasses.replace(STRIDED, dtype_name="float64")], [], {}),
        ("untouched", [name_of("a", (6,))], [], {}),
        ("loader", [WHOLE], [], {"problem": "computed"}),
        ("loader", [dataclasses.replace(WHOLE, problem="aten.exp")], [], {}),
        ("loader", [], [], {"problem": "computed"}),
        ("loader", [name_of("a", (4,), run("w", 0, 0, 4))], [], {}),
    ],
)
def test_kinds(kind, names, fills, fields):
    """How a parameter is written, in a word: what a report says, and what decides whether the loader is needed."""
    assert plan_of(*names, parameters=[parameter("w", 6, **fields)], fills=fills).kind("w") == kind


def test_where_a_name_goes():
    """Each parameter once, constants included, in order."""
    name = name_of("a", (4,), run("y", 0, 0, 2), run("x", 2, 0, 2), run("y", 0, 2, 2), constants=("z", "x"))
    assert name.parameters == ("y", "x", "z")
    assert not name.is_whole
    assert WHOLE.is_whole
    assert not name_of("a", (7,), run("w", 0, 0, 6)).is_whole


def test_copies_of_names_with_a_problem_are_dropped():
    """Nobody can replay what was not followed; the name, and why, stay."""
    broken = dataclasses.replace(WHOLE, name="b", problem="aten.exp")
    plan = plan_of(WHOLE, broken, parameters=[parameter("w", 6)]).without_problems()
    assert [(name.name, name.problem, len(name.copies)) for name in plan.names] == [
        ("a", None, 1),
        ("b", "aten.exp", 0),
    ]


@st.composite
def plans(draw):
    """Any plan: what its parts mean together does not matter here."""
    texts = st.text(max_size=5)
    problems = st.none() | texts
    shapes = st.lists(st.integers(0, 4), max_size=3).map(tuple)
    names = st.builds(
        NamePlan,
        texts,
        texts,
        shapes,
        st.lists(copies(), max_size=2).map(tuple),
        problems,
        st.lists(texts, max_size=2).map(tuple),
    )
    parameters = st.builds(
        ParameterPlan,
        *(texts, texts, texts, shapes, shapes, st.integers(0, 99), st.none() | st.integers(0, 99), problems),
        *(st.booleans(), st.booleans(), st.booleans()),
    )
    boxes = copies().map(lambda copy: copy.source)
    fills = st.builds(Fill, texts, boxes, st.floats(allow_nan=False))
    return Plan(*(tuple(draw(st.lists(each, max_size=3))) for each in (names, parameters, fills)))


@given(plans())
def test_plan_survives_json(plan):
    """What was written down and read again is the same plan, with the same digest."""
    again = Plan.from_dict(json.loads(json.dumps(plan.to_dict())))
    assert again == plan
    assert again.digest == plan.digest
    assert len(plan.digest) == 64


@pytest.mark.parametrize(
    "change",
    [
        lambda plan: dataclasses.replace(plan, fills=()),
        lambda plan: dataclasses.replace(plan, names=(WHOLE, WHOLE)),
        lambda plan: dataclasses.replace(plan, names=(name_of("a", (6,), run("w", 0, 1, 6)),)),
        lambda plan: dataclasses.replace(plan, parameters=(parameter("w", 6, dtype_name="bfloat16"),)),
        lambda plan: dataclasses.replace(plan, parameters=(parameter("w", 2, 3),)),
    ],
    ids=["fill", "names", "destination", "dtype", "shape"],
)
def test_digest_names_the_plan(change):
    """Equal plans have equal digests, and whatever places a byte otherwise has another one."""

    def plan():
        return plan_of(WHOLE, parameters=[parameter("w", 6)], fills=[PADDING])

    assert plan().digest == plan().digest
    assert change(plan()).digest != plan().digest
