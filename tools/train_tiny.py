"""Train the two tiny models that nanovllm ships, on the text in `tools/corpus/`.

    python tools/train_tiny.py                         # Qwen3: about twenty minutes on two CPU cores
    python tools/train_tiny.py --architecture qwen3.5  # Qwen3.5, whose layers keep states: 36 minutes on one core
    python tools/train_tiny.py --evaluate-only         # evaluate the saved model

`ARCHITECTURES` says which folder and which picture of the loss are written.

The model must memorize this corpus and learn two-digit addition, for which 200 sums are held out. So a validation loss
would not be useful. Instead, the program prints how many questions are answered word for word by greedy decoding after
the weights are rounded to bfloat16. The entries' `U:` wordings are held out of training: the share of them that is
answered correctly shows how much the model generalizes.

This file does not import nanovllm. The networks are transformers' own, an independent reference for what the engine
must compute.
"""

import argparse
import json
import math
import random
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
import torch.nn.functional as F
import transformers
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from tqdm import tqdm
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # so that `python tools/train_tiny.py` finds tools.read_corpus
from tools.read_corpus import SUM_WORDINGS, Entry, load_corpus, normalize, split_sums, sum_exchange  # noqa: E402

if TYPE_CHECKING:
    Model: TypeAlias = Qwen3ForCausalLM | transformers.Qwen3_5ForCausalLM

# A question and its answer.
Exchange = tuple[str, str]

END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
PAD_ID, TURN_START_ID, TURN_END_ID = 0, 1, 2  # the trainer numbers special tokens first
VOCAB_SIZE = 2048
MAX_POSITIONS = 2048
ROPE_THETA = 10000.0
INITIALIZER_RANGE = 0.06  # the usual 0.02 is meant for wider layers; short trials learned far slower with it

# Qwen's splitting rule: words keep the space before them, each digit is separate.
SPLIT_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

CHAT_TEMPLATE = (
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)

SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You are a helpful, honest and concise assistant.",
    "Answer the user's questions.",
    "You are an expert in LLM inference.",
    "Be brief.",
)

# The mixture of training examples; the values were found by short trial runs.
SHARE_MULTI_TURN = 0.22  # conversations of two or three exchanges
SHARE_SYSTEM_PROMPT = 0.08
SHARE_LOWER_CASE = 0.15  # as users often type
SHARE_NO_PUNCTUATION = 0.25
SHARE_DROPPED_WORD = 0.1
MIN_WORDS_TO_DROP = 4  # a shorter question needs all of its words
SUMS_PER_PASS = 2500  # with 500 the held-out sums were still at 42 %


@dataclass(frozen=True)
class Example:
    """One conversation as the model sees it: three lists of the same length."""

    token_ids: list[int]
    positions: list[int]
    is_answer: list[bool]  # the token is part of an answer, so predicting it has a loss


@dataclass(frozen=True)
class Batch:
    """Examples padded on the right. With a causal mask, no real token attends to the padding."""

    token_ids: torch.Tensor  # [batch, seq_len]
    positions: torch.Tensor  # [batch, seq_len]
    is_answer: torch.Tensor  # [batch, seq_len], bool


# --- tokenizer ---------------------------------------------------------------------------------------------------


def train_tokenizer(texts: list[str]) -> Tokenizer:
    """Train a byte-level BPE tokenizer. All 256 bytes are in the vocabulary, so any text can be encoded and decoded."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[END_OF_TEXT, TURN_START, TURN_END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    if tokenizer.get_vocab_size() != VOCAB_SIZE:
        raise ValueError(f"the corpus is too small for {VOCAB_SIZE} tokens, got {tokenizer.get_vocab_size()}")
    return tokenizer


def corpus_texts(entries: list[Entry]) -> list[str]:
    """Return the texts that the tokenizer is trained on, including the words of the chat format."""
    texts = [text for entry in entries for text in (*entry.questions, entry.answer)]
    return texts + ["system", "user", "assistant", *SYSTEM_PROMPTS] * 5


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write tokenizer.json and its config directly: transformers 5 would write the chat template to a separate file."""
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        # The generic class: the one that reads tokenizer.json as it is, in transformers 4 and 5.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": MAX_POSITIONS,
        "model_input_names": ["input_ids", "attention_mask"],  # transformers 4's default has token_type_ids too
        "bos_token": None,
        "eos_token": TURN_END,
        "pad_token": END_OF_TEXT,
        "additional_special_tokens": [TURN_START, TURN_END],
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    _write_json(folder / "tokenizer_config.json", config)


# --- conversations -----------------------------------------------------------------------------------------------


def encode_turn(tokenizer: Tokenizer, role: str, content: str) -> list[int]:
    return tokenizer.encode(f"{TURN_START}{role}\n{content}{TURN_END}\n").ids


def encode_conversation(
    tokenizer: Tokenizer, exchanges: list[Exchange], system: str | None = None, gaps: list[int] | None = None
) -> Example:
    """Return the chat template's tokens, with the answers marked up to and including their `<|im_end|>`.

    `gaps[i]` positions are left out before exchange i. RoPE depends only on distances, so a gap trains the model on the
    distances of a long conversation at the cost of a short one.
    """
    ids = encode_turn(tokenizer, "system", system) if system else []
    positions, is_answer = list(range(len(ids))), [False] * len(ids)
    newline = len(tokenizer.encode("\n").ids)
    header = len(tokenizer.encode(f"{TURN_START}assistant\n").ids)
    for i, (question, answer) in enumerate(exchanges):
        user_turn = encode_turn(tokenizer, "user", question)
        answer_turn = encode_turn(tokenizer, "assistant", answer)
        num_answer = len(answer_turn) - header - newline
        start = (positions[-1] + 1 if positions else 0) + (gaps[i] if gaps else 0)
        ids += user_turn + answer_turn
        positions += range(start, start + len(user_turn) + len(answer_turn))
        is_answer += [False] * (len(user_turn) + header) + [True] * num_answer + [False] * newline
    return Example(ids, positions, is_answer)


def perturb_question(question: str, rng: random.Random) -> str:
    """Return the question as a user may type it: sometimes without a word, in lower case, or without its question mark.

    So the model does not rely on a single word.
    """
    words = question.split(" ")
    if len(words) >= MIN_WORDS_TO_DROP and rng.random() < SHARE_DROPPED_WORD:
        del words[rng.randrange(len(words))]
        question = " ".join(words)
    if rng.random() < SHARE_LOWER_CASE:
        question = question.lower()
    if rng.random() < SHARE_NO_PUNCTUATION:
        question = question.rstrip("?.! ") or question
    return question


def make_pass(
    entries: list[Entry], sums: list[tuple[int, int]], long_repeats: int, rng: random.Random
) -> list[Exchange]:
    """Return each trained wording once (those of long answers `long_repeats` times) and new sums, in random order."""
    unseen = {normalize(entry.unseen) for entry in entries}
    exchanges = []
    for entry in entries:
        for question in entry.questions * (long_repeats if entry.is_long else 1):
            perturbed = perturb_question(question, rng)
            # a lost word must not turn a trained wording into a held-out one
            exchanges.append((question if normalize(perturbed) in unseen else perturbed, entry.answer))
    for pair in rng.sample(sums, SUMS_PER_PASS):
        exchanges.append(sum_exchange(pair, rng.randrange(len(SUM_WORDINGS))))
    rng.shuffle(exchanges)
    return exchanges


def make_examples(tokenizer: Tokenizer, exchanges: list[Exchange], rng: random.Random) -> list[Example]:
    """Group exchanges into conversations: mostly of one, sometimes of two or three, sometimes with a system prompt."""
    examples = []
    while exchanges:
        num_exchanges = rng.choice((2, 3)) if rng.random() < SHARE_MULTI_TURN else 1
        chosen, exchanges = exchanges[:num_exchanges], exchanges[num_exchanges:]
        system = rng.choice(SYSTEM_PROMPTS) if rng.random() < SHARE_SYSTEM_PROMPT else None
        example = encode_conversation(tokenizer, chosen, system)
        if len(chosen) > 1 and rng.random() < 0.5:
            free = MAX_POSITIONS - len(example.token_ids)
            gaps = [0] + [rng.randint(0, free // (len(chosen) - 1)) for _ in chosen[1:]]
            example = encode_conversation(tokenizer, chosen, system, gaps)
        examples.append(example)
    return examples


# --- batches -----------------------------------------------------------------------------------------------------


def group_by_length(examples: list[Example], batch_tokens: int) -> list[list[Example]]:
    """Group examples of similar length into batches of at most `batch_tokens` padded tokens, to have little padding."""
    groups: list[list[Example]] = []
    for example in sorted(examples, key=lambda e: len(e.token_ids)):
        # The examples are sorted by length, so the new one decides the padded length of its group.
        if groups and (len(groups[-1]) + 1) * len(example.token_ids) <= batch_tokens:
            groups[-1].append(example)
        else:
            groups.append([example])
    return groups


def pad(examples: list[Example]) -> Batch:
    seq_len = max(len(example.token_ids) for example in examples)
    missing = [seq_len - len(example.token_ids) for example in examples]
    rows = list(zip(examples, missing, strict=True))
    return Batch(
        token_ids=torch.tensor([e.token_ids + [PAD_ID] * n for e, n in rows]),  # [batch, seq_len]
        positions=torch.tensor([e.positions + [0] * n for e, n in rows]),  # [batch, seq_len]
        is_answer=torch.tensor([e.is_answer + [False] * n for e, n in rows]),  # [batch, seq_len]
    )


def endless_batches(entries: list[Entry], tokenizer: Tokenizer, args: argparse.Namespace) -> Iterator[Batch]:
    """Yield batches of one pass over the corpus after another, each with new perturbations, conversations and order."""
    rng = random.Random(args.seed)
    trained_sums, _ = split_sums()
    while True:
        exchanges = make_pass(entries, trained_sums, args.long_repeats, rng)
        groups = group_by_length(make_examples(tokenizer, exchanges, rng), args.batch_tokens)
        rng.shuffle(groups)
        yield from map(pad, groups)


# --- model and training ------------------------------------------------------------------------------------------


def build_qwen3() -> Qwen3ForCausalLM:
    """Build a Qwen3 of 3.5 M parameters with all its features: GQA, q/k norm, its own head_dim, tied embeddings."""
    # Qwen3Config accepts any keyword, but transformers 5 declares neither of these.
    undeclared: dict[str, Any] = {"rope_theta": ROPE_THETA, "attn_implementation": "sdpa"}
    config = Qwen3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=256,
        intermediate_size=640,
        num_hidden_layers=4,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=MAX_POSITIONS,
        initializer_range=INITIALIZER_RANGE,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=TURN_END_ID,
        pad_token_id=PAD_ID,
        **undeclared,
    )
    return Qwen3ForCausalLM(config)


def build_qwen3_5() -> "transformers.Qwen3_5ForCausalLM":
    """Build a Qwen3.5 of 3.5 M parameters. Three of its four layers are Gated DeltaNet, with fewer heads of keys.

    The fourth layer attends, with GQA and a gate, and rotates a quarter of each head.
    """
    config = transformers.Qwen3_5TextConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=256,
        intermediate_size=640,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=64,
        linear_value_head_dim=64,
        max_position_embeddings=MAX_POSITIONS,
        rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA, "partial_rotary_factor": 0.25},
        initializer_range=INITIALIZER_RANGE,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=TURN_END_ID,
        pad_token_id=PAD_ID,
    )
    model = transformers.Qwen3_5ForCausalLM(config)
    for layer in model.model.layers:
        if layer.block_type == "linear_attention":
            let_state_remember(layer.linear_attn)
    return model


def let_state_remember(mixer: Any) -> None:
    """Set initial values as the authors of Gated DeltaNet do: some heads forget after a token, some after thousands.

    With the initial values of transformers, which a checkpoint replaces, most heads forget after one token.
    """
    mixer.conv1d.reset_parameters()
    steps = torch.empty(mixer.num_v_heads).uniform_(math.log(0.001), math.log(0.1)).exp()  # [num_v_heads]
    mixer.dt_bias.data = steps + torch.log(-torch.expm1(-steps))  # [num_v_heads]; the softplus of it is `steps`


@dataclass(frozen=True)
class Architecture:
    """What differs between the models that this program trains: the defaults of the options with these names."""

    build: Callable[[], "Model"]
    output: str
    plot: str
    steps: int
    batch_tokens: int
    lr: float
    bfloat16: bool


ARCHITECTURES = {
    "qwen3": Architecture(
        build=build_qwen3,
        output="nanovllm/assets/tiny-qwen3",
        plot="docs/images/train_tiny_loss.png",
        steps=3500,
        batch_tokens=2048,
        lr=3e-3,
        bfloat16=False,
    ),
    "qwen3.5": Architecture(
        build=build_qwen3_5,
        output="nanovllm_extras/assets/tiny-qwen3.5",
        plot="docs/images/train_tiny_hybrid_loss.png",
        steps=4400,
        batch_tokens=1024,
        lr=2.5e-3,
        bfloat16=True,
    ),
}


def answer_logits(model: "Model", batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """Return logits and targets only for the answers' tokens, which saves most of the LM head's work."""
    hidden = model.model(
        input_ids=batch.token_ids,
        position_ids=batch.positions,
        # Without a mask tensor, attention is causal. If this were None instead of a dict, transformers would build a
        # mask, and treat a gap in the positions as the border between two packed sequences.
        attention_mask={"full_attention": None, "linear_attention": None},
        use_cache=False,
    ).last_hidden_state  # [batch, seq_len, hidden]
    is_target = batch.is_answer[:, 1:]  # [batch, seq_len - 1]; position t predicts token t + 1
    logits = model.lm_head(hidden[:, :-1][is_target])  # [num_targets, vocab]
    return logits, batch.token_ids[:, 1:][is_target]  # [num_targets]


def learning_rate(step: int, args: argparse.Namespace) -> float:
    """Return the learning rate of a step: a linear warm-up, then half a cosine down to zero."""
    if step < args.warmup_steps:
        return args.lr * (step + 1) / args.warmup_steps
    progress = (step - args.warmup_steps) / max(1, args.steps - args.warmup_steps)
    return args.lr * 0.5 * (1 + math.cos(math.pi * progress))


def make_optimizer(model: "Model", args: argparse.Namespace) -> torch.optim.AdamW:
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    gains = [p for p in model.parameters() if p.ndim < 2]  # of norms and decays: they have no weight decay
    groups = [{"params": matrices, "weight_decay": args.weight_decay}, {"params": gains, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, 0.95), fused=True)


def train(model: "Model", batches: Iterator[Batch], args: argparse.Namespace) -> list[float]:
    """Train the model and return the loss of every step."""
    optimizer = make_optimizer(model, args)
    losses, num_tokens, started = [], 0, time.perf_counter()
    progress = tqdm(range(args.steps), desc="training", mininterval=args.log_interval_s)
    for step in progress:
        batch = next(batches)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, args)
        with torch.autocast("cpu", torch.bfloat16, enabled=args.bfloat16):
            logits, targets = answer_logits(model, batch)
        loss = F.cross_entropy(logits.float(), targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        num_tokens += batch.token_ids.numel()
        progress.set_postfix(loss=f"{sum(losses[-50:]) / len(losses[-50:]):.4f}", refresh=False)
    seconds = time.perf_counter() - started
    print(f"{args.steps} steps, {num_tokens:,} tokens in {seconds:.0f} s: {num_tokens / seconds:,.0f} tokens/s")
    return losses


def plot_losses(losses: list[float], name: str, path: Path) -> None:
    """Plot the loss of every step as a faint dot, and a running mean."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    window = max(1, min(50, len(losses)))
    means = [sum(losses[i : i + window]) / window for i in range(len(losses) - window + 1)]
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    axes.plot(losses, ".", markersize=1.5, alpha=0.25, color="tab:gray", label="step")
    axes.plot(range(window - 1, len(losses)), means, color="tab:blue", label=f"mean of {window} steps")
    axes.set(yscale="log", xlabel="step", ylabel="loss on the answers' tokens", title=f"Training {name}")
    axes.grid(alpha=0.3)
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)


# --- saving ------------------------------------------------------------------------------------------------------


def save_model(model: "Model", folder: Path) -> None:
    """Save the weights in bfloat16, with configs that both transformers 4.51 and 5 can read."""
    folder.mkdir(parents=True, exist_ok=True)
    model.bfloat16().save_pretrained(folder)
    (folder / "model.safetensors").chmod(0o644)  # by default, only the owner can read it
    config = json.loads((folder / "config.json").read_text())
    # transformers 5 writes the base to `rope_parameters` and the dtype to `dtype`; 4.51 reads only these two fields.
    config |= {"rope_theta": ROPE_THETA, "torch_dtype": "bfloat16"}
    config.pop("transformers_version", None)
    _write_json(folder / "config.json", config)
    generation = {"do_sample": False, "eos_token_id": [TURN_END_ID, PAD_ID], "pad_token_id": PAD_ID}
    _write_json(folder / "generation_config.json", generation)


def _write_json(path: Path, content: dict) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")


# --- evaluation --------------------------------------------------------------------------------------------------


@torch.inference_mode()
def count_right(model: "Model", examples: list[Example], batch_tokens: int = 8192) -> int:
    """Return the number of examples that greedy decoding answers word for word.

    Generating is not necessary: greedy decoding gives the target exactly if, with the target as input, the largest
    logit is right at every position. A conversation counts only if all its answers are right.
    """
    num_right = 0
    for group in group_by_length(examples, batch_tokens):
        batch = pad(group)
        logits, targets = answer_logits(model, batch)  # [num_targets, vocab], [num_targets]
        wrong = torch.zeros_like(batch.is_answer)  # [batch, seq_len]
        wrong[:, 1:][batch.is_answer[:, 1:]] = logits.argmax(-1) != targets
        num_right += int((~wrong.any(dim=1)).sum())
    return num_right


def evaluation_groups(entries: list[Entry], tokenizer: Tokenizer) -> dict[str, list[Example]]:
    """Return the conversations to evaluate, grouped by name."""
    _, held_out_sums = split_sums()
    rng = random.Random(1)
    trained = {
        is_long: [(q, e.answer) for e in entries if e.is_long == is_long for q in e.questions]
        for is_long in (False, True)
    }
    unseen = {is_long: [(e.unseen, e.answer) for e in entries if e.is_long == is_long] for is_long in (False, True)}
    sums = [sum_exchange(pair, i) for i, pair in enumerate(held_out_sums)]
    everything = trained[False] + trained[True] + sums
    groups = {
        "short answers, trained wordings": [[exchange] for exchange in trained[False]],
        "long answers, trained wordings": [[exchange] for exchange in trained[True]],
        "held-out sums": [[exchange] for exchange in sums],
        "short answers, unseen wordings": [[exchange] for exchange in unseen[False]],
        "long answers, unseen wordings": [[exchange] for exchange in unseen[True]],
        "two exchanges, both right": [rng.sample(everything, 2) for _ in range(200)],
    }
    examples = {name: [encode_conversation(tokenizer, chat) for chat in chats] for name, chats in groups.items()}
    sampled = rng.sample(everything, 200)
    examples["with a system prompt"] = [encode_conversation(tokenizer, [e], SYSTEM_PROMPTS[0]) for e in sampled]
    return examples


def print_evaluation(folder: Path, entries: list[Entry]) -> None:
    """Print the accuracy of the saved model, computed in float32 and in bfloat16 from the same bfloat16 weights."""
    groups = evaluation_groups(entries, Tokenizer.from_file(str(folder / "tokenizer.json")))
    print(f"{'answered word for word':34}{'float32':>18}{'bfloat16':>18}")
    models_by_dtype: list[Any] = [
        AutoModelForCausalLM.from_pretrained(folder, dtype=d) for d in (torch.float32, torch.bfloat16)
    ]
    for name, examples in groups.items():
        counts = [count_right(model, examples) for model in models_by_dtype]
        cells = [f"{count}/{len(examples)} {count / max(1, len(examples)):7.2%}" for count in counts]
        print(f"{name:34}" + "".join(f"{cell:>18}" for cell in cells))


# --- main --------------------------------------------------------------------------------------------------------


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", type=Path, default=ROOT / "tools/corpus", help="folder of *.txt files")
    parser.add_argument("--architecture", choices=ARCHITECTURES, default="qwen3")
    parser.add_argument("--output", type=Path, help="model folder")
    parser.add_argument("--plot", type=Path, help="loss curve")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--warmup-steps", type=int, default=150)
    parser.add_argument("--batch-tokens", type=int, help="maximum of padded tokens in a batch")
    parser.add_argument("--long-repeats", type=int, default=1, help="how often a pass contains a long explanation")
    parser.add_argument("--lr", type=float, help="peak learning rate")
    parser.add_argument("--bfloat16", action=argparse.BooleanOptionalAction, help="multiply matrices in bfloat16")
    parser.add_argument("--weight-decay", type=float, default=0.1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2, help="CPU threads")
    parser.add_argument("--log-interval-s", type=float, default=1.0, help="seconds between progress updates")
    parser.add_argument("--evaluate-only", action="store_true", help="evaluate the saved model without training")
    args = parser.parse_args()
    for name, value in vars(ARCHITECTURES[args.architecture]).items():
        if getattr(args, name, None) is None:
            setattr(args, name, ROOT / value if name in ("output", "plot") else value)
    return args


def main() -> None:
    args = parse_args()
    torch.set_num_threads(args.threads)
    entries = load_corpus(args.corpus)
    if not args.evaluate_only:
        args.output.mkdir(parents=True, exist_ok=True)
        tokenizer = train_tokenizer(corpus_texts(entries))
        save_tokenizer(tokenizer, args.output)
        torch.manual_seed(args.seed)
        model = args.build()
        num_questions = sum(len(entry.questions) for entry in entries)
        print(f"{len(entries)} entries, {num_questions} trained wordings, {model.num_parameters():,} parameters")
        losses = train(model, endless_batches(entries, tokenizer, args), args)
        save_model(model, args.output)
        plot_losses(losses, args.output.name, args.plot)
    print_evaluation(args.output, entries)


if __name__ == "__main__":
    main()
