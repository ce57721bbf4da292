"""Answer the tasks with a real checkpoint, the same function many times and damaged ones, and record every item.

    python -m tests.calibration.planted aa       # the same function, other orders of additions
    python -m tests.calibration.planted damage   # noise in steps, a layer zeroed, wrong scales, a swapped template

Runs in the environment `source` (torch, transformers) from the root, about 6 minutes each on 2 free cores, and goes on
where it was stopped. Its records, recorded.json, are small and kept in git; tests/calibration/rates.py judges them.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

from pipeline import jsonio
from pipeline.canary import judge, of_canary
from pipeline.evidence.tiers import choose
from pipeline.fidelity import Logprobs, bucketed_kl
from pipeline.program import versions

MODEL = Path("artifacts/models/smollm2-135m")
HELD_OUT = Path("calib_data/held-out.smollm2-135m/tokens.json")
OUT = Path(__file__).parent / "recorded.json"
WINDOWS, TOP_K = 8, 20
ITEMS = 240
NOISE_STEPS = (0.04, 0.06, 0.08, 0.11, 0.15)
ORDERS = ("given", "shuffled", "longest first")
SCALES = (("mlp.down_proj", 1, 0.0625), ("self_attn.v_proj", 5, 16.0), ("mlp.gate_proj", 20, 4.0))
Run = Callable[[], dict[str, Any]]
# Another family's way to write a chat: [INST] as Llama 2 has it.
OTHER_TEMPLATE = "{% for m in messages %}[INST] {{ m['content'] }} [/INST]{% endfor %}"


class Packed(NamedTuple):
    """A prompt and its choices as one sequence.

    part: -1 of the prompt, else the choice. scored: (choice, position that predicts, token) of each token of a choice.
    """

    tokens: list[int]
    positions: list[int]
    part: list[int]
    scored: list[tuple[int, int, int]]


class Reader:
    """The model and what it is asked."""

    def __init__(self, items: int) -> None:
        """Load the checkpoint in bf16, `items` questions chosen by a hash of their ids, and the held-out windows."""
        self.tokenizer = AutoTokenizer.from_pretrained(MODEL)
        self.model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.bfloat16)
        self.model.eval()
        text = Path("stages/client/tasks/facts.jsonl").read_text(encoding="utf-8")
        docs = sorted((json.loads(line) for line in text.splitlines()), key=lambda d: d["id"])
        self.docs = [docs[i] for i in choose([d["id"] for d in docs], items)]
        self.rows = json.loads(HELD_OUT.read_text(encoding="utf-8"))["input_ids"][:WINDOWS]
        self.packed = [self.pack(doc) for doc in self.docs]

    def pack(self, doc: dict[str, Any]) -> Packed:
        """Put a prompt and its four choices into one sequence: a choice sees the prompt and itself, not the others."""
        prompt = self.tokenizer.encode(doc["prompt"])
        tokens, positions, part, scored = list(prompt), list(range(len(prompt))), [-1] * len(prompt), []
        for number, choice in enumerate(doc["choices"]):
            whole = self.tokenizer.encode(f"{doc['prompt']} {choice}")
            assert whole[: len(prompt)] == prompt
            before = len(prompt) - 1
            for offset, token in enumerate(whole[len(prompt) :]):
                scored.append((number, before, token))
                before = len(tokens)
                tokens.append(token)
                positions.append(len(prompt) + offset)
                part.append(number)
        return Packed(tokens, positions, part, scored)

    @torch.inference_mode()
    def facts(self, batch: int, order: str, seed: int) -> str:
        """Return '1' or '0' per document: whether the right choice has the highest log-likelihood (lm-eval's acc)."""
        queue = list(range(len(self.docs)))
        if order == "shuffled":
            queue = torch.randperm(len(queue), generator=torch.Generator().manual_seed(seed)).tolist()
        elif order == "longest first":
            queue.sort(key=lambda i: -len(self.packed[i].tokens))
        marks = ["0"] * len(self.docs)
        for start in range(0, len(queue), batch):
            part = queue[start : start + batch]
            for i, likelihood in zip(part, self.likelihoods([self.packed[i] for i in part]), strict=True):
                marks[i] = "1" if likelihood.index(max(likelihood)) == self.docs[i]["gold"] else "0"
        return "".join(marks)

    def likelihoods(self, rows: list[Packed]) -> list[list[float]]:
        """Return the log-likelihood of every choice of some documents, `[documents][4]`."""
        width = max(len(row.tokens) for row in rows)
        ids, positions = torch.zeros(2, len(rows), width, dtype=torch.long)
        hidden_from = torch.full((len(rows), 1, width, width), torch.finfo(torch.bfloat16).min, dtype=torch.bfloat16)
        for r, row in enumerate(rows):
            n = len(row.tokens)
            ids[r, :n], positions[r, :n] = torch.tensor(row.tokens), torch.tensor(row.positions)
            part = torch.tensor([*row.part, *[-2] * (width - n)])
            sees = ((part[None, :] == -1) | (part[None, :] == part[:, None])).tril()
            hidden_from[r, 0][sees] = 0
        out = self.model.model(input_ids=ids, position_ids=positions, attention_mask=hidden_from).last_hidden_state
        # One product with the vocabulary for all positions that count: small ones are slow on a CPU.
        places = [(r, *scored) for r, row in enumerate(rows) for scored in row.scored]
        picked = out[[p[0] for p in places], [p[2] for p in places]]
        wanted = torch.tensor([p[3] for p in places])
        logs = self.model.lm_head(picked).float().log_softmax(-1)[torch.arange(len(places)), wanted].tolist()
        likelihood = [[0.0] * 4 for _ in rows]
        for (r, choice, _, _), value in zip(places, logs, strict=True):
            likelihood[r][choice] += value
        return likelihood

    @torch.inference_mode()
    def windows(self, batch: int) -> Logprobs:
        """Return the top-k log-probabilities over the held-out windows, as the pipeline keeps them."""
        parts = []
        for start in range(0, WINDOWS, batch):
            ids = torch.tensor(self.rows[start : start + batch])
            logs = self.model(input_ids=ids).logits[:, :-1].float().log_softmax(-1)
            top = logs.topk(TOP_K, dim=-1)
            actual = logs.gather(-1, ids[:, 1:, None])[..., 0]
            parts.append((top.indices.flatten(0, 1), top.values.flatten(0, 1), actual.flatten()))
        ids_, values, actual = (torch.cat(x).numpy() for x in zip(*parts, strict=True))
        per_window = len(self.rows[0]) - 1
        window = torch.arange(WINDOWS).repeat_interleave(per_window).numpy()
        return Logprobs(ids_, values.astype(float), actual.astype(float), window)

    @torch.inference_mode()
    def canary(self, template: str | None) -> list[dict[str, Any]]:
        """Answer the canary's prompts greedily through a chat template."""
        prompts = yaml.safe_load(Path("stages/client/canary.yaml").read_text(encoding="utf-8"))["prompts"]
        answers = []
        for prompt in prompts:
            asked = [{"role": "user", "content": prompt["prompt"]}]
            ids = self.tokenizer.apply_chat_template(
                asked, chat_template=template, add_generation_prompt=True, return_tensors="pt", return_dict=True
            )["input_ids"]
            out = self.model.generate(ids, max_new_tokens=prompt["max_tokens"], do_sample=False)[0, ids.shape[1] :]
            ended = bool((out == self.tokenizer.eos_token_id).any())
            answers.append({
                "text": self.tokenizer.decode(out, skip_special_tokens=True), "tokens": len(out),
                "finish_reason": "stop" if ended else "length", "prompt_tokens": ids.shape[1],
            })  # fmt: skip
        return answers


def compare(base: Logprobs, mine: Logprobs) -> list[list[float]]:
    """Return per window the mean KL, the mean log-ratio of probabilities of the text, and the top-1 agreement in %."""
    kl, gap = bucketed_kl(base, mine), base.actual - mine.actual
    same = 100.0 * (base.ids[:, 0] == mine.ids[:, 0])
    rows = []
    for number in sorted(set(base.window.tolist())):
        part = base.window == number
        rows.append([round(float(x[part].mean()), 6) for x in (kl, gap, same)])
    return rows


@torch.no_grad()
def permute(model: Any, seed: int) -> None:
    """Put the hidden and the MLP's channels of a Llama in another order: the same function, other roundings.

    Sums run in another order, so every output is rounded anew, as on another batch shape, kernel or GPU. On a CPU
    another batch size alone changes no bit of the answers.
    """
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randperm(model.config.hidden_size, generator=generator)
    inner = model.model
    inner.embed_tokens.weight.data = inner.embed_tokens.weight.data[:, hidden].contiguous()
    assert model.lm_head.weight is inner.embed_tokens.weight  # tied
    inner.norm.weight.data = inner.norm.weight.data[hidden]
    for layer in inner.layers:
        channels = torch.randperm(model.config.intermediate_size, generator=generator)
        mlp, attention = layer.mlp, layer.self_attn
        for norm in (layer.input_layernorm, layer.post_attention_layernorm):
            norm.weight.data = norm.weight.data[hidden]
        for into in (attention.q_proj, attention.k_proj, attention.v_proj):
            into.weight.data = into.weight.data[:, hidden].contiguous()
        for into in (mlp.gate_proj, mlp.up_proj):
            into.weight.data = into.weight.data[channels][:, hidden].contiguous()
        attention.o_proj.weight.data = attention.o_proj.weight.data[hidden].contiguous()
        mlp.down_proj.weight.data = mlp.down_proj.weight.data[hidden][:, channels].contiguous()


def same_weights(reader: Reader) -> Iterator[tuple[str, Run]]:
    """Yield 21 runs of the same function, each but the first with its own order of additions; the first is the base."""
    kept = {name: value.clone() for name, value in reader.model.state_dict().items()}
    base = reader.windows(8)

    def run(number: int, name: str, attention: str, batch: int, order: str) -> dict[str, Any]:
        reader.model.load_state_dict(kept)
        reader.model.set_attn_implementation(attention)
        if number:
            permute(reader.model, number)
        correct = reader.facts(batch, order, number)
        return {"name": name, "correct": correct, "windows": compare(base, reader.windows(8))}

    for number in range(21):
        attention, order = ("sdpa", "eager")[number % 2], ORDERS[number % 3]
        batch = 16 + 8 * (number % 7)
        name = f"{attention}, batches of {batch} {order}, channels in order {number}"
        yield name, lambda a=(number, name, attention, batch, order): run(*a)


def damages(reader: Reader) -> Iterator[tuple[str, Run]]:
    """Yield the runs with planted damage, the first without any."""
    kept = {name: value.clone() for name, value in reader.model.state_dict().items()}
    base = reader.windows(8)

    def run(kind: str, name: str, plant: Callable[[], None]) -> dict[str, Any]:
        reader.model.load_state_dict(kept)
        plant()
        windows = compare(base, reader.windows(8))
        return {"kind": kind, "name": name, "correct": reader.facts(32, "given", 0), "windows": windows}

    for kind, name, plant in plants(reader):
        yield name, lambda a=(kind, name, plant): run(*a)


def plants(reader: Reader) -> Iterator[tuple[str, str, Callable[[], None]]]:
    """Yield (kind, name, what does it to the loaded weights)."""
    layers = reader.model.model.layers

    def noise(step: float, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for layer in layers:
            for module in layer.modules():
                if isinstance(module, torch.nn.Linear):
                    weight = module.weight.data
                    weight += step * weight.std() * torch.randn(weight.shape, generator=generator).to(weight.dtype)

    def zero(layer: int) -> None:
        for parameter in layers[layer].parameters():
            parameter.data.zero_()

    def scale(name: str, layer: int, factor: float) -> None:
        reader.model.get_submodule(f"model.layers.{layer}.{name}").weight.data *= factor

    yield "none", "the same weights", lambda: None
    for seed in (1, 2):
        for step in NOISE_STEPS:
            yield "noise", f"noise of {step:g} standard deviations, seed {seed}", lambda a=step, b=seed: noise(a, b)
    for layer in (3, 26):
        yield "zeroed", f"layer {layer} zeroed", lambda a=layer: zero(a)
    for name, layer, factor in SCALES:
        text = f"scale of layers.{layer}.{name} wrong by {factor:g}"
        yield "scale", text, lambda a=name, b=layer, c=factor: scale(a, b, c)


def templates(reader: Reader) -> dict[str, Any]:
    """Judge the canary through the model's own template and through another family's."""
    prompts = yaml.safe_load(Path("stages/client/canary.yaml").read_text(encoding="utf-8"))["prompts"]
    own, other = reader.canary(None), reader.canary(OTHER_TEMPLATE)
    theirs = of_canary(prompts, own)
    found = {}
    for name, answers in (("own", own), ("swapped", other)):
        verdict = judge(prompts, answers, theirs)
        found[name] = {"passed": verdict["passed"], "reasons": [f["reason"] for f in verdict["failures"]],
                       "prompt_tokens_differ": verdict["lengths"]["prompt_tokens_differ"],
                       "right": verdict["known"]["right"]}  # fmt: skip
    return found


def main() -> None:
    """Run the part that the command line names; what recorded.json already has is not run again."""
    part = sys.argv[1] if len(sys.argv) == 2 else ""
    if part not in ("aa", "damage"):
        sys.exit("usage: python -m tests.calibration.planted aa|damage")
    torch.manual_seed(0)
    torch.set_num_threads(2)
    start = time.monotonic()
    reader = Reader(ITEMS)
    record = json.loads(OUT.read_text(encoding="utf-8")) if OUT.exists() else {}
    record |= {
        "model": "smollm2-135m, bf16, transformers on CPU",
        "per_window": ["kl_mean", "log_ratio_mean", "top1_agreement_pct"],
        "versions": versions("torch", "transformers"),
    }
    done = {run["name"]: run for run in record.get(part, [])}
    record[part] = list(done.values())
    for name, plant in same_weights(reader) if part == "aa" else damages(reader):
        if name not in done:
            record[part].append(plant())
            jsonio.write_text(OUT, json.dumps(record) + "\n")
            right = record[part][-1]["correct"].count("1") / ITEMS
            print(f"{time.monotonic() - start:.0f} s  {name}: {right:.4f}", flush=True)
    if part == "damage" and "template" not in record:
        record["template"] = templates(Reader(ITEMS))  # its weights are as they came
        jsonio.write_text(OUT, json.dumps(record) + "\n")
    print(f"{OUT}: {len(record[part])} runs in {time.monotonic() - start:.0f} s", flush=True)


if __name__ == "__main__":
    main()
