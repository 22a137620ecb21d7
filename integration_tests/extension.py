"""Mixed into vLLM's worker class by tests: calls that every rank answers, about the model that it serves."""

from __future__ import annotations

import os
from typing import Any

if os.environ.get("WT_TEST_UNPACKED") == "1":
    # Layers of vLLM's CPU build multiply with packed copies of their weights; without them they do as on CUDA. This module is
    # imported by each worker before it builds its model. oneDNN packs on every CPU; with AMX, another kernel packs small layers
    # in bfloat16. Experts and convolutions stay packed: their kernels take nothing else.
    import vllm._custom_ops
    import vllm.model_executor.layers.utils

    vllm._custom_ops._supports_onednn = False
    vllm.model_executor.layers.utils.check_cpu_sgl_kernel = lambda *_: False


class EchoExtension:
    """Mixed into vLLM's worker class by `--worker-extension-cls`."""

    def echo_rank(self, value: Any) -> str:
        return f"{value} from rank {self.rank}"


class StageExtension:
    """What a vLLM in pipeline stages lacks on a CPU."""

    def make_stage_buffers(self) -> None:
        """The runner has room for what the stage before it hands over; on a GPU its warm-up makes it."""
        runner = self.model_runner
        if runner.intermediate_tensors is None:
            runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
                batch_size=runner.max_num_tokens, dtype=runner.model_config.dtype, device=runner.device
            )


class PlacementExtension:
    """What tests of placement ask a worker."""

    def live_digests(self) -> dict[str, int]:
        """The digest of every parameter and buffer that serves, by its name."""
        from wt_worker.digest import tensor_digest

        model = self.model_runner.model
        tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        return {name: tensor_digest(tensor) for name, tensor in tensors.items()}

    def kinds(self) -> dict[str, str]:
        """How each parameter that the last round wrote is written, by the plan."""
        engine = self.weight_transfer_engine
        plan = list(engine._installers[id(engine.model)]._states.values())[-1].plan
        return {each.name: plan.kind(each.name) for each in plan.parameters if plan.kind(each.name) != "untouched"}

    def flip_next(self, moment: str, param: str, rank: int) -> None:
        """On this rank, once, a bit of `param` flips: in `flight`, in `staging`, or when it is `installed`."""
        if rank != self.rank:
            return
        from wt_worker.channels.gloo import GlooChannel
        from wt_worker.placement.writer import RoundWriter

        engine = self.weight_transfer_engine
        if moment == "installed":
            tensor = self.model_runner.model.get_parameter(param)
            _once(engine, "_await_verdict", lambda *_: _flip(tensor))
        elif moment == "staging":
            (*_, known) = (each for (model, _), each in engine._known.items() if model == id(engine.model))
            names = known.metadata.names

            def flip(writer: Any, group: Any, arrival: Any, _: int) -> bool:
                for piece, data in zip(group.pieces, arrival.data, strict=True):
                    if names[piece.index] == param:
                        _flip(data)
                        return True
                return False

            _once(RoundWriter, "take", flip)
        else:
            original = GlooChannel.broadcast

            def broadcast(channel: Any, buffers: Any, deadline: float, **options: Any) -> Any:
                GlooChannel.broadcast = original
                transfer = original(channel, buffers, deadline, **options)
                _flip(buffers[0])  # the first parameter's first bit
                return transfer

            GlooChannel.broadcast = broadcast

    def plant(self, trap: str) -> str:
        """The model is one that a write in place would get wrong in the way named; returned is the layer that is concerned.

        What earlier rounds have proved is forgotten.
        """
        self.weight_transfer_engine._installers.clear()
        self._undo = []
        return str(getattr(self, f"_plant_{trap}")(self.model_runner.model))

    def uproot(self) -> None:
        """What was planted is gone."""
        for undo in reversed(self._undo):
            undo()
        self.weight_transfer_engine._installers.clear()

    def refuses_moving_experts(self) -> str:
        """What is raised where experts are balanced while the server runs."""
        from types import SimpleNamespace

        from wt_worker.vllm.derived import refuse

        try:
            refuse(SimpleNamespace(parallel_config=SimpleNamespace(enable_eplb=True)))
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return ""

    def move_experts(self) -> None:
        """The planted map of experts says something else than when the model was loaded."""
        layer = self.model_runner.model.model.layers[0].mlp
        layer._expert_map.copy_(layer._expert_map.flip(0))

    def _plant_float_copy(self, model: Any) -> str:
        attention = model.model.layers[0].self_attn.attn
        attention.impl.probe = model.model.layers[0].input_layernorm.weight.detach().double()
        self._undo.append(lambda: delattr(attention.impl, "probe"))
        return "model.layers.0.input_layernorm"

    def _plant_concatenated(self, model: Any) -> str:
        import torch

        layer = model.model.layers[0]
        weights = (layer.mlp.gate_up_proj.weight, layer.self_attn.qkv_proj.weight)
        layer.mlp.probe = [torch.cat([weight.detach() for weight in weights])]
        self._undo.append(lambda: delattr(layer.mlp, "probe"))
        return "model.layers.0.mlp.gate_up_proj"

    def _plant_transform(self, model: Any, change: Any) -> None:
        """The processing of the first layer's o_proj changes its weight, in the same shape."""
        method = model.model.layers[0].self_attn.o_proj.quant_method
        original = method.process_weights_after_loading

        def process(layer: Any) -> None:
            original(layer)
            layer.weight.data.copy_(change(layer.weight.data))

        method.process_weights_after_loading = process
        self._undo.append(lambda: delattr(method, "process_weights_after_loading"))

    def _plant_transposed(self, model: Any) -> str:
        weight = model.model.layers[0].self_attn.o_proj.weight
        size = weight.shape[0]
        square = slice(0, size)

        def transpose(data: Any) -> Any:
            data = data.clone()
            data[:, square] = data[:, square].t().clone()
            return data

        self._plant_transform(model, transpose)
        return "model.layers.0.self_attn.o_proj"

    def _plant_repacked(self, model: Any) -> str:
        self._plant_transform(model, lambda data: data.flip(0))
        return "model.layers.0.self_attn.o_proj"

    def _plant_replaced(self, model: Any) -> str:
        import torch

        norm = model.model.layers[0].input_layernorm
        original = model.load_weights

        def load(pairs: Any) -> Any:
            norm.register_parameter("weight", torch.nn.Parameter(torch.empty(norm.weight.shape), requires_grad=False))
            return original(pairs)

        model.load_weights = load
        self._undo.append(lambda: delattr(model, "load_weights"))
        return "model.layers.0.input_layernorm"

    def _plant_detached_view(self, model: Any) -> str:
        """What a buffer shows was the weight's memory, until processing gave the weight other memory."""
        layer = model.model.layers[0].mlp
        weight = layer.down_proj.weight
        layer.register_buffer("probe", weight.data.view(-1), persistent=False)
        self._undo.append(lambda: delattr(layer, "probe"))
        weight.data = weight.data.clone()
        return "model.layers.0.mlp.down_proj"

    def _plant_loaded_copy(self, model: Any) -> str:
        """A layer that goes through the loader for good keeps a copy of its weight, which is made once."""
        layer = model.model.layers[0].mlp.down_proj
        layer.quant_method = _unknown_method(layer.quant_method)
        layer.probe = layer.weight.detach().clone()
        self._undo.append(
            lambda: (delattr(layer, "probe"), setattr(layer, "quant_method", layer.quant_method.original))
        )
        return "model.layers.0.mlp.down_proj"

    def _plant_loaded_view(self, model: Any) -> str:
        """A view of what such a layer's processing makes anew each time: the new one follows, the view does not."""
        import torch

        layer = model.model.layers[0].mlp.down_proj
        layer.quant_method = _unknown_method(layer.quant_method, lambda it: setattr(it, "made", it.weight.data.clone()))
        layer.made = layer.weight.data.clone()
        model.model.layers[0].probe = layer.made.view(-1).view(torch.int32).view(layer.made.dtype).view_as(layer.made)
        self._undo.append(lambda: delattr(model.model.layers[0], "probe"))
        self._undo.append(lambda: (delattr(layer, "made"), setattr(layer, "quant_method", layer.quant_method.original)))
        return "model.layers.0.mlp.down_proj"

    def _plant_moved_weight(self, model: Any) -> str:
        """A round gives a weight other memory, and a view of the old one remains."""
        layer = model.model.layers[0].mlp.down_proj
        layer.quant_method = _unknown_method(layer.quant_method)
        model.model.layers[0].probe = layer.weight.data[0]
        original = model.load_weights

        def load(pairs: Any) -> Any:
            result = original(pairs)
            if not layer.weight.is_meta:
                layer.weight.data = layer.weight.data.clone()
            return result

        model.load_weights = load
        self._undo.append(lambda: (delattr(model, "load_weights"), delattr(model.model.layers[0], "probe")))
        self._undo.append(lambda: setattr(layer, "quant_method", layer.quant_method.original))
        return "model.layers.0.mlp.down_proj"

    def _plant_emptied_copy(self, model: Any) -> str:
        """A copy of a weight of which nothing serves but what was made from it; the first load of the two makes it."""
        import torch

        layer = model.model.layers[0].mlp.down_proj

        def process(it: Any) -> None:
            if not hasattr(it, "probe"):
                it.probe = it.weight.data.clone()
            it.packed = it.weight.data.t().contiguous()
            it.weight = torch.nn.Parameter(torch.empty(0), requires_grad=False)

        before = layer.weight
        layer.quant_method = _unknown_method(layer.quant_method, process)
        layer.weight = torch.nn.Parameter(torch.empty(0), requires_grad=False)
        self._undo.append(lambda: (delattr(layer, "probe"), delattr(layer, "packed"), setattr(layer, "weight", before)))
        self._undo.append(lambda: setattr(layer, "quant_method", layer.quant_method.original))
        return "model.layers.0.mlp.down_proj"

    def _plant_emptied_norm(self, model: Any) -> str:
        """Something has taken what it needs from a norm's weight, and emptied it."""
        import torch

        norm = model.model.layers[0].input_layernorm
        before = norm.weight
        norm.weight = torch.nn.Parameter(torch.empty(0), requires_grad=False)
        self._undo.append(lambda: setattr(norm, "weight", before))
        return "model.layers.0.input_layernorm"

    def _plant_emptied_by_attention(self, model: Any) -> str:
        """Latent attention takes a copy of a projection's weight and empties it, as it does on a CPU with AMX."""
        layers = [layer for layer in model.modules() if type(layer).__name__ == "MLAAttention"]
        for layer in layers:
            _empty_when_processed(layer)
        return str(len(layers))

    def _plant_float_biases(self, model: Any) -> str:
        """Biases are float32, whatever they were loaded in, as vLLM's packing for AMX makes them."""
        layers = [layer for layer in model.modules() if getattr(layer, "bias", None) is not None]
        for layer in layers:
            layer.bias.data = layer.bias.data.float()
        return str(len(layers))

    def _plant_two_names(self, model: Any) -> str:
        before = model.lm_head.weight
        model.lm_head.weight = model.model.embed_tokens.weight
        self._undo.append(lambda: setattr(model.lm_head, "weight", before))
        return "lm_head"

    def _plant_expert_map(self, model: Any) -> str:
        import torch

        layer = model.model.layers[0].mlp
        layer._expert_map = torch.arange(4)
        self._undo.append(lambda: delattr(layer, "_expert_map"))
        return "model.layers.0.mlp.gate_up_proj"


def _empty_when_processed(layer: Any) -> None:
    import torch

    source, original = layer.kv_b_proj, layer.process_weights_after_loading

    def process(dtype: Any) -> None:
        original(dtype)
        layer.impl.taken = source.weight.data.clone()
        source.weight = torch.nn.Parameter(torch.empty(0), requires_grad=False)

    layer.process_weights_after_loading = process
    source.quant_method.apply = lambda _, x, bias=None: torch.nn.functional.linear(x, layer.impl.taken, bias)
    process(next(layer.parameters()).dtype)


def _unknown_method(original: Any, process: Any = lambda _: None) -> Any:
    """A quantization method that is on no list, so that its layer goes through the loader; it processes by `process`."""

    class UnknownMethod(type(original)):
        def __init__(self) -> None:
            self.__dict__.update(original.__dict__, original=original)

        def process_weights_after_loading(self, layer: Any) -> None:
            super().process_weights_after_loading(layer)
            process(layer)

    return UnknownMethod()


def _once(owner: Any, name: str, before: Any) -> None:
    """The next call of `owner.name` comes after `before(*arguments)`; one that returns False leaves it for the call after."""
    original = getattr(owner, name)

    def changed(*args: Any) -> Any:
        if before(*args) is not False:
            setattr(owner, name, original)
        return original(*args)

    setattr(owner, name, changed)


def _flip(tensor: Any) -> None:
    """The lowest bit of the first byte is the other one."""
    import torch

    data = tensor.detach().reshape(-1).view(torch.uint8)
    data[:1].bitwise_xor_(1)


class TestExtension(EchoExtension, StageExtension, PlacementExtension):
    """All of it."""

    __test__ = False
