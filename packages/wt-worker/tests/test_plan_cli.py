"""`python -m wt_worker.plan` without vLLM: what it reads, how it asks a server, what it prints. The server is a real socket."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch

from wt_common import ConfigurationError
from wt_worker import plan as cli
from wt_worker.placement.describe import LayerDescription, PlanDescription
from wt_worker.placement.plan import Box, Copy, Fill, NamePlan, ParameterPlan, Plan

WHY = "multiplies with a packed copy of its weight (cpu_linear)"


def layer(name, *, kind="whole", in_place=None, reason=None):
    return {"name": name, "class_name": "Linear", "kinds": {"weight": kind}, "in_place": in_place, "reason": reason}


def answer(layers, rank=0, size=1, **fields):
    base = {"rank": rank, "size": size, "device": "cpu", "digest": f"{rank}" * 64, "num_names": 9}
    return {**base, "layers": layers, "ignored": [], "untouched": [], **fields}


# --- descriptions ------------------------------------------------------------------------------------------


def small_plan(problem=None):
    """Of one layer: a weight that is a copy, and a bias that is filled, or has a problem; and a name that nothing takes."""
    whole = Box.whole((4,))
    return Plan(
        names=(
            NamePlan("l.w", "float32", (4,), (Copy(whole, "l.weight", whole),)),
            NamePlan("rope.inv_freq", "float32", (4,)),
            NamePlan("odd", "float32", (4,), problem="aten.mul (loader.py:7)"),
        ),
        parameters=(
            ParameterPlan("l.weight", "l", "float32", (4,), (1,), 4, 4),
            ParameterPlan("l.bias", "l", "float32", (4,), (1,), 4, 4, problem=problem),
        ),
        fills=(Fill("l.bias", whole, 0.0),),
    )


@pytest.mark.parametrize(
    ("is_proved", "reason", "in_place"),
    [(True, None, True), (False, None, None), (True, WHY, False), (False, WHY, False)],
)
def test_in_place_is_true_once_proved_and_false_for_the_loader(is_proved, reason, in_place):
    """A reason outweighs a proof."""
    found = LayerDescription.of(small_plan(), "l", "Linear", ["l.weight", "l.bias"], is_proved=is_proved, reason=reason)
    assert (found.in_place, found.reason) == (in_place, reason)
    assert found.kinds == {"weight": "whole", "bias": "contiguous+filled"}


def test_the_reason_names_the_operation():
    """Also where the layer goes through the loader anyway."""
    plan = small_plan("aten.exp (mamba.py:12)")
    for reason in ("aten.exp (mamba.py:12)", WHY):
        found = LayerDescription.of(plan, "l", "Linear", ["l.weight", "l.bias"], is_proved=False, reason=reason)
        assert found.kinds["bias"] == "loader"
        assert found.reason.startswith(reason)
        assert found.reason.count("aten.exp (mamba.py:12)") == 1


def test_ignored_is_what_nothing_takes_and_nothing_prevents():
    """A name with a problem is not ignored. All fields are plain JSON values."""
    found = PlanDescription.of(small_plan(), [], ["l.scale"]).to_dict()
    assert found["ignored"] == ["rope.inv_freq"]
    assert found["untouched"] == ["l.scale"]
    assert found["num_names"] == 3
    assert json.loads(json.dumps(found)) == found


# --- folding and the table ---------------------------------------------------------------------------------


def names(layers):
    return [each["name"] for each in cli.fold(layers)]


def test_equal_layers_are_one_line():
    """Those that differ in anything but their number are not."""
    layers = [layer(f"model.layers.{at}.q", kind="strided" if at == 3 else "whole") for at in range(6)]
    assert names([layer("model.embed"), *layers, layer("head")]) == [
        "model.embed",
        "model.layers.0-2,4-5.q",
        "model.layers.3.q",
        "head",
    ]


def test_two_numbers_in_a_name():
    """The last one first; layers with other experts are other layers."""
    layers = [layer(f"m.{at}.experts.{expert}.w") for at in range(3) for expert in range(4 if at < 2 else 2)]
    assert names(layers) == ["m.0-1.experts.0-3.w", "m.2.experts.0-1.w"]
    assert names([layer("m.0.a"), layer("m.1.b"), layer("0"), layer("1")]) == ["m.0.a", "m.1.b", "0-1"]


def test_a_reason_may_repeat_the_layers_numbers():
    """It then has stars for them; a layer that is alone keeps its reason."""
    layers = [layer(f"m.{at}.mlp", in_place=False, reason=f"m.{at}.mlp.w is served with 2") for at in range(3)]
    assert [(each["name"], each["reason"]) for each in cli.fold(layers)] == [
        ("m.0-2.mlp", "m.*.mlp.w is served with 2")
    ]
    assert cli.fold(layers[:1])[0]["reason"] == "m.0.mlp.w is served with 2"
    other = layer("m.3.mlp", in_place=False, reason="m.7.mlp.w is served with 2")
    assert names([*layers, other]) == ["m.0-2.mlp", "m.3.mlp"]


def test_fold_names():
    """Names alone fold, too, and the order of first appearance stays."""
    assert cli.fold_names(["b.1.x", "a", "b.0.x", "b.2.y"]) == ["b.0-1.x", "a", "b.2.y"]
    assert cli.fold_names([]) == []


def test_table():
    """One line per kind of layer, with its way; ranks that have the same table share it."""
    layers = [
        layer("embed", kind="contiguous+filled", in_place=True),
        *(layer(f"m.{at}.q", in_place=False, reason=WHY) for at in range(2)),
        {**layer("m.0.norm"), "kinds": {"weight": "whole", "bias": "whole", "scale": "loader"}},
    ]
    text = cli.render([answer(layers, rank, 3) for rank in range(2)] + [answer([layer("embed")], 2, 3)])
    head, counts, _, *table = text.partition("\n\nrank 2")[0].splitlines()
    assert head == "rank 0-1 of 3 (cpu): 9 names, plan 000000000000, 111111111111"
    assert counts == "4 layers: 1 in place, 1 once proved, 2 through the loader"
    assert [line.split() for line in table] == [
        ["layer", "class", "parameters", "installed"],
        ["embed", "Linear", "weight:", "contiguous+filled", "in", "place"],
        ["m.0-1.q", "Linear", "weight:", "whole", "loader:", *WHY.split()],
        ["m.0.norm", "Linear", "weight,", "bias:", "whole;", "scale:", "loader", "in", "place", "once", "proved"],
    ]
    assert len({line.index("Linear") for line in table[1:]}) == 1
    assert "rank 2 of 3" in text
    assert not any(line != line.rstrip() for line in text.splitlines())


def test_ignored_on_every_rank():
    """What one rank takes is not ignored, and nothing is said where nothing is."""
    text = cli.render([answer([], 0, 2, ignored=["r.0.f", "x", "r.1.f"]), answer([], 1, 2, ignored=["r.0.f", "r.1.f"])])
    assert "ignored by the loader, on every rank: r.0-1.f" in text
    assert "none of these names" not in text


# --- the checkpoint ----------------------------------------------------------------------------------------


@pytest.fixture
def checkpoint(tmp_path):
    """A folder with a configuration, and a function that writes a safetensors file into it."""
    save = pytest.importorskip("safetensors.torch").save_file
    (tmp_path / "config.json").write_text("{}")
    return tmp_path, lambda name, **tensors: save(tensors, tmp_path / name)


def test_rows_of_one_file(checkpoint):
    """`model.safetensors` is the checkpoint, whatever else lies beside it."""
    path, save = checkpoint
    save("model.safetensors", a=torch.zeros(2, 3), b=torch.zeros((), dtype=torch.bfloat16), c=torch.zeros(0, 4).int())
    save("consolidated.safetensors", other=torch.zeros(1))
    assert sorted(cli.checkpoint_rows(path)) == [
        ("a", "float32", [2, 3]),
        ("b", "bfloat16", []),
        ("c", "int32", [0, 4]),
    ]


def test_rows_of_shards(checkpoint):
    """The index says what is in which file; a tensor that it does not name is not part of the checkpoint."""
    path, save = checkpoint
    save("one.safetensors", a=torch.zeros(2), stale=torch.zeros(1))
    save("two.safetensors", b=torch.zeros(3, dtype=torch.float8_e4m3fn))
    index = path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}))
    assert cli.checkpoint_rows(path) == [("a", "float32", [2]), ("b", "float8_e4m3fn", [3])]
    index.write_text(json.dumps({"weight_map": {"a": "one.safetensors", "b": "three.safetensors"}}))
    with pytest.raises(ConfigurationError, match=r"three\.safetensors.*is the checkpoint complete\?"):
        cli.checkpoint_rows(path)
    index.write_text("[]")
    with pytest.raises(ConfigurationError, match=r"expected a JSON object with weight_map"):
        cli.checkpoint_rows(path)


def test_rows_of_shards_without_an_index(checkpoint):
    """All files that there are."""
    path, save = checkpoint
    save("b.safetensors", b=torch.zeros(2))
    save("a.safetensors", a=torch.zeros(2, dtype=torch.bool))
    assert cli.checkpoint_rows(path) == [("a", "bool", [2]), ("b", "float32", [2])]


def test_no_checkpoint(checkpoint):
    """Each says what was expected."""
    path, _ = checkpoint
    with pytest.raises(ConfigurationError, match=r"no such directory"):
        cli.checkpoint_rows(path / "absent")
    with pytest.raises(ConfigurationError, match=r"no \*\.safetensors"):
        cli.checkpoint_rows(path)
    (path / "model.safetensors").write_bytes(b"{}")
    with pytest.raises(ConfigurationError, match=r"model\.safetensors: .*is the checkpoint complete\?"):
        cli.checkpoint_rows(path)
    (path / "config.json").unlink()
    with pytest.raises(ConfigurationError, match=r"found no config\.json"):
        cli.checkpoint_rows(path)


# --- the command -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        ([], "--model or --url is required"),
        (["--tp", "2"], "--model or --url is required"),
        (["--model", "d", "--tp", "0"], "--tp: expected at least 1, got 0"),
        (["--model", "d", "--timeout", "5"], "--timeout is for --url only"),
        (["--url", "http://h", "--dtype", "float32"], "--dtype is for a vLLM that is started here"),
        (["--url", "file:///etc/hosts"], "expected http://HOST:PORT or https://HOST:PORT, got 'file:///etc/hosts'"),
        (["--url", "10.0.0.7:8000"], "expected http://HOST:PORT"),
    ],
)
def test_wrong_arguments(argv, text, capsys):
    """They end with 2 and say what was expected, before anything is started or asked."""
    with pytest.raises(SystemExit) as exit_:
        cli.main(argv)
    assert exit_.value.code == 2
    assert text in capsys.readouterr().err


def test_no_vllm_here(checkpoint, monkeypatch):
    """The text says what to do; a missing folder is named first."""
    path, save = checkpoint
    save("model.safetensors", a=torch.zeros(2))
    monkeypatch.setattr(cli.importlib.util, "find_spec", lambda name: None)
    for folder, text in (
        (path, "vLLM is not installed here: pip install vllm"),
        (path / "absent", "no such directory"),
    ):
        with pytest.raises(SystemExit) as exit_:
            cli.main(["--model", str(folder)])
        assert text in exit_.value.code


@pytest.fixture
def server():
    """A server with the two routes that are asked; `extension` and `results` are what it says, `calls` what it was asked."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            assert self.path == "/server_info?config_format=json"
            self.reply({"vllm_config": {"parallel_config": {"worker_extension_cls": self.server.extension}}})

        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            self.server.calls.append((self.path, body))
            self.reply({"results": self.server.results})

        def reply(self, payload):
            data = json.dumps(payload).encode() if self.server.is_json else b"<html>"
            self.send_response(self.server.status)
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *args):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.extension, server.results, server.calls = cli.EXTENSION, [answer([layer("l")])], []
        server.status, server.is_json = 200, True
        server.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def refused(*argv):
    """The text with which the command ends."""
    with pytest.raises(SystemExit) as exit_:
        cli.main(argv)
    return exit_.value.code


def test_a_server_is_asked_about_its_last_round(server, capsys):
    """`--json` prints every rank's answer as it is; without it, the table."""
    cli.main(["--url", server.url, "--json"])
    assert json.loads(capsys.readouterr().out) == server.results
    cli.main(["--url", f"{server.url}/"])
    assert "in place once proved" in capsys.readouterr().out
    assert server.calls == [("/collective_rpc", {"method": "wt_plan", "args": []})] * 2


def test_a_server_is_asked_about_a_checkpoint(server, checkpoint, capsys):
    """Names, dtypes and shapes go with the question."""
    path, save = checkpoint
    save("model.safetensors", a=torch.zeros(2, 3))
    cli.main(["--url", server.url, "--model", str(path), "--json"])
    assert server.calls[0][1]["args"] == [[["a", "float32", [2, 3]]]]


@pytest.mark.parametrize("extension", ["", "their.Extension"])
def test_a_server_without_the_extension_is_not_called(server, extension):
    """A call of a method that is not there would put its ranks out of step; a subclass may be named."""
    server.extension = extension
    assert f"--worker-extension-cls {cli.EXTENSION}" in refused("--url", server.url)
    assert server.calls == []
    if extension:
        cli.main(["--url", server.url, "--extension", extension])
        assert len(server.calls) == 1


def test_a_rank_that_cannot_tell(server):
    """Its text is the command's."""
    server.results = [answer([]), {"rank": 1, "size": 2, "device": "cpu", "error": "PlanError: no round was announced"}]
    assert refused("--url", server.url) == "error: rank 1: PlanError: no round was announced"


def test_a_server_that_does_not_answer(server):
    """No development mode, a failure, something else on the port, nobody there."""
    server.status = 404
    assert "404); start it with VLLM_SERVER_DEV_MODE=1" in refused("--url", server.url)
    server.status = 500
    assert "500 Internal Server Error" in refused("--url", server.url)
    server.status, server.is_json = 200, False
    assert "not JSON" in refused("--url", server.url)
    assert "does a server listen there?" in refused("--url", "http://127.0.0.1:1")
