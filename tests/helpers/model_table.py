"""The table of docs/explanation/models.md, from what loading says: `python tests/helpers/model_table.py` writes it."""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path

from tiny_models import REFUSED, RUNNING
from tokenyard.model.families import FAMILIES
from tokenyard.model.hf_loading import class_reasons, config_reasons
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

PAGE = Path(__file__).parents[2] / "docs" / "explanation" / "models.md"
_TABLE = re.compile(r"(?<=<!-- table: tests/helpers/model_table.py -->\n).*?(?=<!-- end -->)", re.DOTALL)
_NOT_BUILT = {"gemma3n": "refused: its image tower needs packages that Tokenyard does not install"}


def how_it_runs(model_type: str) -> str:
    """Fast decoder, adapter, or refused and why; KeyError for a type that nobody tried."""
    if model_type in {family.name for family in FAMILIES.values()}:
        return "fast decoder"
    if model_type in {case.model_type for case in RUNNING.values()}:
        return "adapter"
    found = {refusal.case.model_type: refusal.because for refusal in REFUSED.values()}
    if model_type in found:
        return f"refused: {found[model_type]}"
    reasons = _reasons(model_type)
    return f"refused: {_shortened(reasons[-1])}" if reasons else _NOT_BUILT[model_type]


def table() -> str:
    """Markdown: a row for each way, with the model types that go it."""
    types: dict[str, list[str]] = defaultdict(list)
    for model_type in sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
        types[how_it_runs(model_type)].append(model_type)
    order = sorted(types, key=lambda how: (how != "fast decoder", how != "adapter", -len(types[how]), how))
    rows = [f"| {how} | {len(types[how])} | {', '.join(f'`{name}`' for name in types[how])} |" for how in order]
    return "\n".join(["| How | Types | `model_type` |", "| --- | --- | --- |", *rows, ""])


def with_table(text: str) -> str:
    """The page's text with the table written anew."""
    return _TABLE.sub(lambda _: table(), text)


def _shortened(reason: str) -> str:
    return reason.removeprefix("it ").removesuffix(", which a K/V cache cannot hold")


def _reasons(model_type: str) -> list[str]:
    """Why no model of the type can run, as far as the config's defaults and the class tell; the class last."""
    config_class = CONFIG_MAPPING[model_type]
    found = class_reasons(MODEL_FOR_CAUSAL_LM_MAPPING[config_class])
    return found or config_reasons(config_class())


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text()))
