"""Our weight-transfer engine, which runs inside vLLM's workers: tensors come as a safetensors file that both sides see.

The rollout service has checked the file against the policy before a worker hears of it. vLLM imports this module into
its workers as their extension, and with that the engine is registered.
"""

from __future__ import annotations

from dataclasses import dataclass

from safetensors import safe_open
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

BACKEND = "turnwire-file"


class WorkerExtension:
    """What vLLM mixes into its workers: nothing but this module's import."""


@dataclass
class FileUpdate(WeightTransferUpdateInfo):  # type: ignore[misc] # vLLM is another environment's
    """`path` of a safetensors file with every tensor of the policy, under the names of its checkpoint."""

    path: str


class FileTransferEngine(WeightTransferEngine[WeightTransferInitInfo, FileUpdate]):  # type: ignore[misc] # as above
    """See the module's docstring."""

    init_info_cls = WeightTransferInitInfo
    update_info_cls = FileUpdate

    def init_transfer_engine(self, init_info: WeightTransferInitInfo) -> None:
        """There is nobody to meet."""

    def start_weight_update(self) -> None:
        """Begin a reload of the checkpoint, layer by layer."""
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, str]) -> None:
        """As vLLM's own, which waits for an accelerator after it: there is none on a CPU, and copies are done."""
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: FileUpdate) -> None:
        """Load the file's tensors as those of a checkpoint."""
        with safe_open(update_info.path, framework="pt") as tensors:
            self.model.load_weights((name, tensors.get_tensor(name)) for name in tensors.keys())  # noqa: SIM118 - no dict

    def finish_weight_update(self) -> None:
        """Bring the last layers into the form in which kernels want them."""
        finalize_layerwise_reload(self.model, self.model_config)
        head = getattr(self.model, "lm_head", None)
        if self.model_config.hf_config.tie_word_embeddings and head is not None:
            # No tensor comes under its name, so vLLM leaves what its kernel made of the old one.
            head.quant_method.process_weights_after_loading(head)

    def shutdown(self) -> None:
        """Nothing is held between updates."""


WeightTransferEngineFactory.register_engine(BACKEND, FileTransferEngine)
