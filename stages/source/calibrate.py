"""Freeze a calibration or held-out set: token ids and a card, under calib_data/<set>.<model>."""

from __future__ import annotations

import json
from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from pipeline import jsonio
from pipeline.calibration import OVERLAP_TOKENS, Document, draw_rows, make_card
from pipeline.errors import unknown
from pipeline.making import arguments
from pipeline.params import load_params
from pipeline.program import run_main
from pipeline.specs import CalibSet
from stages.source.texts import read_documents


def main() -> None:
    """Freeze the set named by --set with the tokenizer of --model."""
    args = arguments("set", "model")
    params = load_params()
    if args.set not in params.calib_sets:
        raise unknown("calibration set", args.set, params.calib_sets, "params.yaml")
    if args.model not in params.models:
        raise unknown("model", args.model, params.models, "params.yaml")
    spec, model = params.calib_sets[args.set], params.models[args.model]
    folder = Path("artifacts/models") / args.model
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=model.trust_remote_code)
    documents, revisions = read_documents(spec)
    out = Path("calib_data") / f"{args.set}.{args.model}"
    held_out = Path("calib_data") / f"{params.evaluation.held_out}.{args.model}" / "tokens.json"
    against = [] if args.set == params.evaluation.held_out else jsonio.read_json(held_out)["input_ids"]
    plain, chat = tokenize(documents, spec, tokenizer, model.instruct)
    rows, dropped = draw_rows(plain, chat, spec, against)
    card = make_card(args.set, args.model, spec, rows, revisions, bool(chat))
    card["overlap_with_held_out"] = (
        f"none of {OVERLAP_TOKENS} tokens; {dropped} windows that shared some were left out"
        if against
        else "it is the held-out set"
    )
    for warning in card["warnings"]:
        print(f"warning: {args.set}: {warning}", flush=True)
    jsonio.write_json(out / "card.json", card)
    jsonio.write_text(out / "tokens.json", json.dumps({"input_ids": rows}, separators=(",", ":")) + "\n")
    print(json.dumps({k: card[k] for k in ("set", "samples", "tokens", "digest")}), flush=True)


def tokenize(
    documents: list[Document], spec: CalibSet, tokenizer: PreTrainedTokenizerBase, instruct: bool
) -> tuple[list[list[int]], list[list[int]]]:
    """Return the ids of each document as plain text and as the answer of a chat.

    The second is empty for a base model, without a chat template, and when no chat rows are wanted.
    """
    plain = [tokenizer(d.text, add_special_tokens=False, verbose=False)["input_ids"] for d in documents]
    if not instruct or tokenizer.chat_template is None or spec.chat_share == 0:
        return plain, []
    chat = []
    for document in documents:
        turns = [
            {"role": "user", "content": f"Tell me about {document.title}."},
            {"role": "assistant", "content": document.text},
        ]
        chat.append(list(tokenizer.apply_chat_template(turns, tokenize=True, return_dict=True)["input_ids"]))
    return plain, chat


if __name__ == "__main__":
    run_main(main)
