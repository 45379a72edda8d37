"""A model spread over the ranks by FSDP2, and its tensors whole again on rank 0.

Rank 0 alone reads files; the others make the same model without numbers, and get their shards from rank 0, tensor by
tensor. Gradients add up over the ranks (they are not averaged): a micro-batch counts the same wherever it is computed.
After each pass a layer's parameters are shards again, so between commands every parameter is a DTensor.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from trainer_service.ranks import Ranks


@torch.no_grad()
def shard(model: Any, ranks: Ranks, device: torch.device) -> None:
    """Shard a transformers model in place: on rank 0 a loaded one, elsewhere one on the meta device."""
    mesh = init_device_mesh(device.type, (ranks.size,))
    wholes = [None if ranks.rank else parameter.detach() for parameter in model.parameters()]
    layers = [module for module in model.modules() if type(module).__name__ in (model._no_split_modules or ())]
    for module in (*layers, model):
        fully_shard(module, mesh=mesh, reshard_after_forward=True)
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)  # gloo cannot multiply while it adds
    if ranks.rank:
        model.to_empty(device=device)
    for parameter, whole_ in zip(model.parameters(), wholes, strict=True):
        parameter.copy_(_spread(whole_, parameter))
    for buffer in model.buffers():
        dist.broadcast(buffer, src=0)


def whole(tensor: Tensor) -> Tensor:
    """A tensor that is not sharded as it is; of a sharded one all of it, on rank 0's CPU, and nothing elsewhere."""
    if not isinstance(tensor, DTensor):
        return tensor
    full = tensor.full_tensor()
    return full.cpu() if tensor.device_mesh.get_rank() == 0 else full.new_empty(0)


def whole_model(model: Any) -> dict[str, Tensor]:
    """The model's state with whole tensors; tied ones are the same tensor."""
    wholes: dict[int, Tensor] = {}
    state = model.state_dict(keep_vars=True)
    for tensor in state.values():
        if id(tensor) not in wholes:
            wholes[id(tensor)] = whole(tensor.detach())
    return {name: wholes[id(tensor)] for name, tensor in state.items()}


def whole_optimizer(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The optimizer's state dict with whole tensors: the same for any number of ranks."""
    state = optimizer.state_dict()
    state["state"] = {
        number: {name: whole(value) for name, value in values.items()} for number, values in state["state"].items()
    }
    return state


def spread_optimizer(optimizer: torch.optim.Optimizer, state: dict[str, Any] | None, ranks: Ranks) -> None:
    """Load what `whole_optimizer` gave rank 0; `state` is None elsewhere."""
    if ranks.size == 1:
        optimizer.load_state_dict(state or {})
        return
    wholes = state["state"] if state else None
    spread = ranks.from_first(lambda: _outline(state or {}))
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for number, values in spread["state"].items():
        for name, value in values.items():
            if value is None:
                values[name] = _spread(wholes and wholes[number][name], parameters[number])
    optimizer.load_state_dict(spread)


def _outline(state: dict[str, Any]) -> dict[str, Any]:
    """The state with None for each tensor that is spread as its parameter is; scalars (as `step`) every rank has."""
    of_parameters = {
        number: {name: None if value.ndim else value for name, value in values.items()}
        for number, values in state["state"].items()
    }
    return {**state, "state": of_parameters}


def _spread(tensor: Tensor | None, like: DTensor) -> DTensor:
    """Rank 0's tensor (None elsewhere), sharded as `like` is."""
    if tensor is None:
        tensor = torch.empty(like.shape, dtype=like.dtype, device=like.device)
    return distribute_tensor(tensor.to(like.device, like.dtype), like.device_mesh, like.placements)
