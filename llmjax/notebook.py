"""Pictures of what a model does, for notebooks. Needs matplotlib (the `notebook` extra)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from .llm import LLM
from .output import RequestOutput

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def logit_lens(llm: LLM, text: str, *, top: int = 1) -> tuple[list[str], np.ndarray, np.ndarray]:
    """What each layer would predict if it were the last (nostalgebraist, 2020).

    Returns:
        The input tokens' texts [T]; and for the embeddings and each layer's output, at each
        position, the ids of the `top` likeliest next tokens, int [L + 1, T, top], and
        their probabilities, float32 of the same shape.
    """
    ids = llm.tokenizer.encode(text)
    states = jnp.stack(llm.forward(ids).hidden_states)
    model = llm.model
    probabilities = jax.nn.softmax(model.logits(model.norm(states)), axis=-1)
    values, best = jax.lax.top_k(probabilities, top)
    return [llm.tokenizer.token_text(i) for i in ids], np.asarray(best), np.asarray(values)


def plot_logit_lens(llm: LLM, text: str) -> Figure:
    """A grid of layers by positions: each layer's best next token, coloured by probability."""
    tokens, best, values = logit_lens(llm, text)
    layers, length = best.shape[:2]
    figure, axes = _axes(1.1 * length + 1.5, 0.28 * layers + 1.2)
    image = axes.imshow(values[..., 0], aspect="auto", cmap="viridis", vmin=0, vmax=1)
    for row in range(layers):
        for column in range(length):
            label = _short(llm.tokenizer.token_text(int(best[row, column, 0])))
            shade = "white" if values[row, column, 0] < 0.6 else "black"
            axes.text(column, row, label, ha="center", va="center", fontsize=7, color=shade)
    axes.set_xticks(range(length), [_short(t) for t in tokens], rotation=45, ha="right")
    axes.set(
        xlabel="input token", ylabel="after layer", title="Logit lens: the next token, by layer"
    )
    axes.invert_yaxis()
    figure.colorbar(image, label="probability")
    return figure


def plot_attention(llm: LLM, text: str, layer: int) -> Figure:
    """One layer's attention weights, a picture for each head.

    Raises:
        ValueError: there is no such layer.
    """
    import matplotlib.pyplot as plt

    ids = llm.tokenizer.encode(text)
    attentions = llm.forward(ids, attentions=True).attentions
    if not -len(attentions) <= layer < len(attentions):
        raise ValueError(f"layer is {layer}, the model has layers 0 to {len(attentions) - 1}")
    weights = np.asarray(attentions[layer], np.float32)
    columns = min(len(weights), 5)
    rows = -(-len(weights) // columns)
    figure, grid = plt.subplots(
        rows, columns, figsize=(2.6 * columns, 2.6 * rows), squeeze=False, layout="constrained"
    )
    labels = [_short(llm.tokenizer.token_text(i)) for i in ids]
    for head, axes in enumerate(grid.flat):
        axes.set_visible(head < len(weights))
        if head < len(weights):
            axes.imshow(weights[head], cmap="magma", vmin=0)
            axes.set_title(f"head {head}", fontsize=8)
            axes.set_xticks(range(len(ids)), labels, rotation=90, fontsize=6)
            axes.set_yticks(range(len(ids)), labels, fontsize=6)
    figure.suptitle(f"Layer {layer}: who (row) looks at whom (column)")
    return figure


def plot_logprobs(output: RequestOutput) -> Figure:
    """A completion's tokens as bars: how sure the model was of each.

    Raises:
        ValueError: the request did not ask for `logprobs`.
    """
    completion = output.outputs[0]
    if completion.logprobs is None:
        raise ValueError("the output has no logprobs: ask for SamplingParams(logprobs=0)")
    rows = [
        row[token] for token, row in zip(completion.token_ids, completion.logprobs, strict=True)
    ]
    figure, axes = _axes(0.35 * len(rows) + 1.5, 2.6)
    values = np.exp([row.logprob for row in rows])
    colours = ["tab:green" if row.rank == 1 else "tab:orange" for row in rows]
    axes.bar(range(len(rows)), values, color=colours)
    axes.set_xticks(
        range(len(rows)), [_short(row.decoded_token or "") for row in rows], rotation=60, ha="right"
    )
    axes.set(
        ylim=(0, 1), ylabel="probability", title="How sure the model was (green: its first choice)"
    )
    return figure


def _axes(width: float, height: float) -> tuple[Figure, Any]:
    import matplotlib.pyplot as plt

    return plt.subplots(figsize=(width, height), layout="constrained")


def _short(text: str) -> str:
    text = text.replace("\n", "\\n").replace("$", r"\$").strip(" ") or "␣"
    return text if len(text) <= 10 else text[:9] + "…"
