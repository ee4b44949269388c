"""Any Hugging Face causal LM on packed tokens, through transformers' attention interface.

transformers' own modeling code runs unchanged; only its attention is Tokenyard's. What the interface does not promise
is checked when the model is loaded: that the model really calls our function, with nothing that we would ignore, and
that a packed batch gives the logits of its sequences alone.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from tokenyard.errors import ModelLoadError
from tokenyard.interfaces.attention import AttentionLayer
from tokenyard.model.causal_lm import CausalLM, ModelShape
from tokenyard.model.hf_attention import (
    ATTENTION_NAME,
    HANDLER_KEYWORD,
    AttentionCall,
    Handler,
    RecordedLayer,
    RecordingHandler,
    RunningHandler,
    common_shape,
    register,
)
from tokenyard.model.hf_loading import (
    build_config,
    class_reasons,
    config_for,
    config_reasons,
    find_class,
    layer_types,
    load_weights,
    one_line,
    refuse,
)
from tokenyard.model.self_check import check_packed_batch

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

    from tokenyard.model.causal_lm import PagedAttention
    from tokenyard.model.files import ModelFiles


class TransformersAdapter(CausalLM):
    """A transformers model whose attention is a step's `PagedAttention`.

    What a family does to its logits is in the same method as all else, so `states` are the logits themselves.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._name = type(model).__name__
        self.description = f"adapter ({self._name})"
        self._keeps_rows = "logits_to_keep" in inspect.signature(model.forward).parameters
        recorded = _record_layers(model, self)
        self._index_of = {layer.layer_idx: index for index, layer in enumerate(recorded)}
        self._shape = _shape_of(recorded, model)

    @property
    def shape(self) -> ModelShape:
        return self._shape

    def states(
        self, token_ids: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor, attention: PagedAttention
    ) -> torch.Tensor:
        return self.run(token_ids, positions, rows, RunningHandler(attention, self._index_of))

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        return states.float()

    def run(
        self, token_ids: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor, handler: Handler
    ) -> torch.Tensor:
        """A forward pass whose attention is `handler`: logits [R, V] in the model's data type."""
        keywords: dict[str, object] = {HANDLER_KEYWORD: handler}
        if self._keeps_rows:
            keywords["logits_to_keep"] = rows
        output = self._model(input_ids=token_ids[None], position_ids=positions[None], use_cache=False, **keywords)
        logits: torch.Tensor = output.logits[0]
        return logits if self._keeps_rows else logits.index_select(0, rows)

    def check(self) -> None:
        """Compare a packed batch with the model's own eager attention; ModelLoadError when they differ."""
        with _one_error(self._name):
            check_packed_batch(
                self._name,
                self._run_packed,
                self._run_alone,
                self._shape.layers,
                vocab_size=self._shape.vocab_size,
                dtype=self._model.dtype,
                device=self._model.device,
            )

    def _run_packed(self, token_ids: torch.Tensor, positions: torch.Tensor, attention: AttentionCall) -> torch.Tensor:
        handler = RunningHandler(attention, self._index_of)
        return self.run(token_ids, positions, torch.arange(len(token_ids), device=token_ids.device), handler)

    def _run_alone(self, token_ids: torch.Tensor) -> torch.Tensor:
        self._model.set_attn_implementation("eager")
        try:
            output = self._model(input_ids=token_ids[None], use_cache=False)  # positions are the model's own affair
        finally:
            self._model.set_attn_implementation(ATTENTION_NAME)
        logits: torch.Tensor = output.logits[0]
        return logits.float()


def load_adapter(files: ModelFiles, *, dtype: torch.dtype, device: torch.device) -> TransformersAdapter:
    """Load, check and wrap a model. No code of the model's folder is run, and nothing is looked up on a network."""
    if files.format != "safetensors":
        raise ModelLoadError(
            f"{files.path}: {files.architecture} from a GGUF file is not available; give a folder with safetensors"
        )
    register()
    config = build_config(files)
    model_class = find_class(files, config)
    refuse(files.architecture, [*class_reasons(model_class), *config_reasons(config)])
    config = config_for(model_class, config)
    model = load_weights(files, model_class, config, dtype, device)
    if model.config._attn_implementation != ATTENTION_NAME:
        refuse(files.architecture, [f"it keeps the attention '{model.config._attn_implementation}'"])
    with torch.inference_mode():
        adapter = TransformersAdapter(model)
        adapter.check()
    return adapter


@contextmanager
def _one_error(name: str) -> Iterator[None]:
    """A ModelLoadError for whatever a model's own code raises when it is called our way."""
    try:
        yield
    except ModelLoadError:
        raise
    except Exception as error:
        raise ModelLoadError(f"{name} cannot be run: its forward fails: {one_line(error)}") from error


def _record_layers(model: PreTrainedModel, adapter: TransformersAdapter) -> list[RecordedLayer]:
    """Run three tokens through the model and see what its attention asks for."""
    name = type(model).__name__
    recorder = RecordingHandler()
    tokens = torch.arange(3, device=model.device)
    with _one_error(name):
        adapter.run(tokens, tokens, tokens[-1:], recorder)
    config = model.config.get_text_config()
    reasons = list(recorder.reasons)
    layer_ids = [layer.layer_idx for layer in recorder.layers]
    if layer_ids != list(range(config.num_hidden_layers)):
        reasons.append(f"of its {config.num_hidden_layers} layers, attention runs in: {layer_ids}")
    elif common_shape(recorder.layers) is None:
        reasons.append("its layers differ in their numbers or sizes of heads")
    else:
        reasons += _window_reasons(config, recorder.layers)
    refuse(name, reasons)
    return recorder.layers


def _window_reasons(config: PreTrainedConfig, layers: Sequence[RecordedLayer]) -> list[str]:
    """The self-check's sequences are shorter than most windows, so the config must confirm what was recorded."""
    window = getattr(config, "sliding_window", None)
    kinds = layer_types(config) or ["sliding_attention"] * len(layers)
    expected = [window if kind == "sliding_attention" else None for kind in kinds]
    recorded = [layer.sliding_window for layer in layers]
    if recorded == expected:
        return []
    return [f"its config asks for the sliding windows {expected}, its layers for {recorded}"]


def _shape_of(recorded: Sequence[RecordedLayer], model: PreTrainedModel) -> ModelShape:
    layers = tuple(
        AttentionLayer(
            index=index,
            scale=layer.scale,
            sliding_window=layer.sliding_window,
            soft_cap=layer.soft_cap,
            sinks=layer.sinks,
        )
        for index, layer in enumerate(recorded)
    )
    first = recorded[0]
    return ModelShape(
        vocab_size=_embedding_rows(model),
        num_heads=first.num_heads,
        num_kv_heads=first.num_kv_heads,
        head_dim=first.head_dim,
        v_head_dim=first.v_head_dim,
        layers=layers,
    )


def _embedding_rows(model: PreTrainedModel) -> int:
    embedding = model.get_input_embeddings()
    if not isinstance(embedding, torch.nn.Embedding):
        raise ModelLoadError(
            f"{type(model).__name__} cannot be run: its input embedding is a {type(embedding).__name__}"
        )
    return embedding.num_embeddings
