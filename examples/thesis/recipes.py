"""The recipes that `accuracy.py` compares: names, and the arguments of train.py that make them. Lengths are shares of the run."""

from __future__ import annotations

from pathlib import Path

COMMON = ("--warmup", "1", "--cooldown", "0", "--mix-prob", "0", "--masks-from", "0", "--batch", "128", "--weight-decay", "1e-4")


def masks(ratio: float, side: int) -> tuple[str, ...]:
    """Token mixing and both channel linears in square blocks, as in the thesis."""
    return ("--config", f"ResMLP5 @ XPatch = masked {ratio} ({side}, {side}); XChannel = masked {ratio} ({side}, {side});")


def tokens_whole(side: int) -> tuple[str, ...]:
    """Half of the weights of all three, token mixing whole, in square blocks; side 1 is weights one by one, beside which one sees what blocks cost."""
    return ("--config", f"ResMLP5 @ XChannel = masked 0.5625 ({side}, {side});")


ADAM, ADAMW = ("--opt", "adam"), ("--opt", "adamw")
HALF = ("--schedule", "cubic:{half}")  # from dense to the ratio over the first half of the steps
FIFTH = ("--schedule", "cubic:{fifth}")
B32, B16 = masks(0.8, 32), masks(0.5, 16)
FREEZE, FREE = ("--guard", "freeze"), ("--guard", "free")

TAYLOR = ("--criterion", "taylor", "--average", "0.9")
LR = ("--lr", "0.01")
TAUGHT, TAUGHT_WD = (("--teacher", f"{{runs}}/final/{teacher}-seed{{seed}}") for teacher in ("dense-muon", "dense-muon-wd0.1"))
BF16 = ("--amp", "bf16")
TAUGHT_BF16 = ("--teacher", "{runs}/final/dense-muon-wd0.1-bf16-seed{seed}", *BF16)
WIDE_TEACHER = ("--teacher", "{runs}/final/dense-d96-muon-wd0.1-bf16-seed0", *BF16)  # half as wide again; the same one for every seed
# 20 epochs more of a dense run that has ended, which goes on teaching
FROM_TEACHER = (*TAUGHT_BF16, "--from-teacher", "--lr", "0.005")
MUON = ("--opt", "muon", "--lr", "0.01")  # for dense and masked alike
# tried with Muon on both sides
CHANGES = {f"lr{rate}": ("--lr", rate) for rate in ("0.02", "0.005")} | {f"wd{decay}": ("--weight-decay", decay) for decay in ("0.1", "0.5")}
CHANGES["smooth0"] = ("--smoothing", "0")
MORE_STEPS = {f"wd0.1-batch{batch}": (*CHANGES["wd0.1"], "--batch", batch) for batch in ("64", "32")}
STILL = {"cover": ("--cover",), "hysteresis": ("--hysteresis", "0.2")}  # against blocks that change places without an effect
RIGL = ("--backward", "rigl", "--dense-every", "50", "--refresh", "50", "--regrow", "gradient:0.3:{late}")

# as many blocks as 32x32 at 80 % keeps in every layer (45 of 180: a ratio of 0.75 achieved), shared out otherwise
TOKENS_WHOLE = ("--config", "ResMLP5 @ XChannel1 = masked 0.8125 (32, 32); XChannel2 = masked 0.875 (32, 32);")
TOKENS_HALF = ("--config", "ResMLP5 @ XPatch = masked 0.5 (32, 32); XChannel1 = masked 0.75 (32, 32); XChannel2 = masked 0.8125 (32, 32);")
# the same blocks in the end, but the last one of each layer leaves before two thirds of the ramp, not with its last step
TOKENS_WHOLE_EARLY = ("--config", "ResMLP5 @ XChannel1 = masked 0.86 (32, 32); XChannel2 = masked 0.92 (32, 32);")
# as many as 16x16 at 50 % keeps (360 of 720), token mixing whole
TOKENS_WHOLE_B16 = tokens_whole(16)
# half of all weights again, shared out otherwise: more of the first channel linear than of the second; a part of token mixing's blocks left out, too
FC1_DENSER = ("--config", "ResMLP5 @ XChannel1 = masked 0.5 (16, 16); XChannel2 = masked 0.625 (16, 16);")
TOKENS_PART = ("--config", "ResMLP5 @ XPatch = masked 0.25 (16, 16); XChannel = masked 0.53125 (16, 16);")
# the same masks; a ratio of 0 lets inputs of token mixing be pruned
BOTH = ("--config", "ResMLP5 @ XPatch = masked 0 (16, 16); XChannel = masked 0.5625 (16, 16);", "--activations", "0.5:4")
# twice the thesis' width: half of all weights, token mixing whole
D128_HALF = ("--dim", "128", "--config", "ResMLP5 @ XChannel = masked 0.515625 (16, 16);")
LATE = ("--masks-from", "{third}", "--schedule", "cubic:{sixth}")  # dense for a third of the steps, at the ratio by half
LAST = ("--masks-from", "{most}", "--schedule", "cubic:{rest}")  # dense for 0.45 of the steps, at the ratio by half
GLOBAL = ("--allocation", "global")
B32_45 = masks(0.75, 32)  # global: 45 of 180 blocks, wherever they lie; the same ratio in every layer would keep 45, too

SEARCH: dict[str, tuple[str, ...]] = {
    "dense-adamw-lr0.01": ("--dense", *ADAMW, *LR),
    "b32-literal": (*B32, *ADAM, *FREE, *LR),
    "b32-cubic": (*B32, *ADAMW, *FREEZE, *HALF, *LR),
    "b32-cubic-taylor": (*B32, *ADAMW, *FREEZE, *HALF, *LR, *TAYLOR),
    "b32-tokens-whole-taylor": (*TOKENS_WHOLE, *ADAMW, *FREEZE, *HALF, *LR, *TAYLOR),
    "b32-tokens-half-taylor": (*TOKENS_HALF, *ADAMW, *FREEZE, *HALF, *LR, *TAYLOR),
    "b32-rigl": (*B32, *ADAMW, *LR, *RIGL),
    "b32-tokens-whole-rigl": (*TOKENS_WHOLE, *ADAMW, *LR, *RIGL),
    "b32-soft-taylor": (*B32, *ADAMW, *FREEZE, *HALF, *LR, *TAYLOR, "--soft"),
    "b32-cubic-taylor-erk": (*B32, *ADAMW, *FREEZE, *HALF, *LR, *TAYLOR, "--allocation", "erk"),
    "b32-cubic-cover": (*B32, *ADAMW, *FREEZE, *HALF, *LR, "--cover"),
    "b32-static-cover-gain": (*B32, *ADAMW, *FREEZE, *LR, "--criterion", "random", "--refresh", "0", "--cover", "--gain"),
    "b32-cubic-taylor-gain": (*B32, *ADAMW, *FREEZE, *HALF, *LR, *TAYLOR, "--gain"),
    "b16-cubic-taylor": (*B16, *ADAMW, *FREEZE, *HALF, *LR, *TAYLOR),
    "dense-adamw-lr0.005": ("--dense", *ADAMW, "--lr", "0.005"),
    "b32-cubic-taylor-lr0.005": (*B32, *ADAMW, *FREEZE, *HALF, "--lr", "0.005", *TAYLOR),
    "b16-cubic": (*B16, *ADAMW, *FREEZE, *HALF, *LR),
    "b32-cubic-ste": (*B32, *ADAMW, *FREE, *HALF, *LR, "--backward", "ste", *TAYLOR),
    "dense-adamw-lr0.02": ("--dense", *ADAMW, "--lr", "0.02"),
    "dense-adamw-wd0.05": ("--dense", *ADAMW, *LR, "--weight-decay", "0.05"),
    "b32-cubic-free": (*B32, *ADAMW, *FREE, *HALF, *LR),
    "dense-adam": ("--dense", *ADAM, *LR),
    "b32-tokens-whole-late": (*TOKENS_WHOLE, *ADAMW, *FREEZE, *LATE, *LR, *TAYLOR),
    "b32-tokens-half-ramp-rigl": (*TOKENS_HALF, *ADAMW, *LR, *RIGL, *HALF),
    "b32-tokens-whole-taylor-lr0.02": (*TOKENS_WHOLE, *ADAMW, *FREEZE, *HALF, "--lr", "0.02", *TAYLOR),
    "b32-tokens-whole-taylor-lr0.005": (*TOKENS_WHOLE, *ADAMW, *FREEZE, *HALF, "--lr", "0.005", *TAYLOR),
    "dense-adamw-lr0.0025": ("--dense", *ADAMW, "--lr", "0.0025"),
    "b16-tokens-whole-taylor": (*TOKENS_WHOLE_B16, *ADAMW, *FREEZE, *HALF, *LR, *TAYLOR),
    "b16-tokens-whole-late": (*TOKENS_WHOLE_B16, *ADAMW, *FREEZE, *LATE, *LR, *TAYLOR),
    "b16-tokens-whole-late-cover": (*TOKENS_WHOLE_B16, *ADAMW, *FREEZE, *LATE, *LR, *TAYLOR, "--cover"),
    "b16-global-taylor": (*B16, *ADAMW, *FREEZE, *HALF, *LR, *TAYLOR, *GLOBAL),
    "b16-global-late": (*B16, *ADAMW, *FREEZE, *LATE, *LR, *TAYLOR, *GLOBAL),
    "b16-tokens-whole-last": (*TOKENS_WHOLE_B16, *ADAMW, *FREEZE, *LAST, *LR, *TAYLOR),
    "b32-global-late": (*B32_45, *ADAMW, *FREEZE, *LATE, *LR, *TAYLOR, *GLOBAL),
    "b32-tokens-whole-last": (*TOKENS_WHOLE, *ADAMW, *FREEZE, *LAST, *LR, *TAYLOR),
    "b16-tokens-whole-ramp-rigl": (*TOKENS_WHOLE_B16, *ADAMW, *LR, *RIGL, *HALF),
    "b16-tokens-whole-ste": (*TOKENS_WHOLE_B16, *ADAMW, *FREE, *HALF, *LR, "--backward", "ste", *TAYLOR),
    "dense-muon": ("--dense", *MUON),
    "b16-tokens-whole-muon": (*TOKENS_WHOLE_B16, *FREEZE, *HALF, *MUON, *TAYLOR),
    "b32-tokens-whole-muon": (*TOKENS_WHOLE, *FREEZE, *HALF, *MUON, *TAYLOR),
    "b16-tokens-whole-late-muon": (*TOKENS_WHOLE_B16, *FREEZE, *LATE, *MUON, *TAYLOR),
    "b16-tokens-whole-late-muon-wd0.1": (*TOKENS_WHOLE_B16, *FREEZE, *LATE, *MUON, *CHANGES["wd0.1"], *TAYLOR),
    "b32-tokens-whole-late-muon": (*TOKENS_WHOLE, *FREEZE, *LATE, *MUON, *TAYLOR),
    "b32-tokens-whole-early-muon": (*TOKENS_WHOLE_EARLY, *FREEZE, *HALF, *MUON, *TAYLOR),
    "b16-tokens-whole-soft": (*TOKENS_WHOLE_B16, *ADAMW, *FREEZE, *HALF, *LR, *TAYLOR, "--soft"),
    **{f"b{side}-tokens-whole-taylor": (*tokens_whole(side), *ADAMW, *FREEZE, *HALF, *LR, *TAYLOR) for side in (8, 4, 1)},
    "b1-tokens-whole-muon": (*tokens_whole(1), *FREEZE, *HALF, *MUON, *TAYLOR),
    **{f"dense-muon-{name}": ("--dense", *MUON, *change) for name, change in CHANGES.items()},
    **{f"b16-tokens-whole-muon-{name}": (*TOKENS_WHOLE_B16, *FREEZE, *HALF, *MUON, *change, *TAYLOR) for name, change in CHANGES.items()},
    "b32-tokens-whole-muon-wd0.1": (*TOKENS_WHOLE, *FREEZE, *HALF, *MUON, *CHANGES["wd0.1"], *TAYLOR),
    **{f"b32-tokens-whole-muon-wd0.1-{name}": (*TOKENS_WHOLE, *FREEZE, *HALF, *MUON, *CHANGES["wd0.1"], *TAYLOR, *more) for name, more in STILL.items()},
    "b16-tokens-whole-muon-wd0.1-hysteresis": (*TOKENS_WHOLE_B16, *FREEZE, *HALF, *MUON, *CHANGES["wd0.1"], *TAYLOR, *STILL["hysteresis"]),
    # with Muon's better decay: masks that go on moving, and blocks shared out otherwise
    "b16-tokens-whole-muon-wd0.1-ste": (*TOKENS_WHOLE_B16, *FREE, *HALF, *MUON, *CHANGES["wd0.1"], "--backward", "ste", *TAYLOR),
    "b16-tokens-whole-muon-wd0.1-ramp-rigl": (*TOKENS_WHOLE_B16, *MUON, *CHANGES["wd0.1"], *RIGL, *HALF),
    "b16-tokens-whole-muon-wd0.1-soft": (*TOKENS_WHOLE_B16, *FREEZE, *HALF, *MUON, *CHANGES["wd0.1"], *TAYLOR, "--soft"),
    "b16-fc1-denser-muon-wd0.1": (*FC1_DENSER, *FREEZE, *HALF, *MUON, *CHANGES["wd0.1"], *TAYLOR),
    "b16-tokens-part-muon-wd0.1": (*TOKENS_PART, *FREEZE, *HALF, *MUON, *CHANGES["wd0.1"], *TAYLOR),
    # one budget for all channel linears, by the weights that they begin with
    "b16-tokens-whole-global-muon-wd0.1": (*TOKENS_WHOLE_B16, *FREEZE, *HALF, *MUON, *CHANGES["wd0.1"], *TAYLOR, *GLOBAL),
    "b16-tokens-whole-global-late-muon-wd0.1": (*TOKENS_WHOLE_B16, *FREEZE, *LATE, *MUON, *CHANGES["wd0.1"], *TAYLOR, *GLOBAL),
    **{f"dense-muon-{name}": ("--dense", *MUON, *change) for name, change in MORE_STEPS.items()},
    **{f"b16-tokens-whole-muon-{name}": (*TOKENS_WHOLE_B16, *FREEZE, *HALF, *MUON, *change, *TAYLOR) for name, change in MORE_STEPS.items()},
    **{f"dense-activations50-x{b}": ("--dense", *ADAMW, *LR, "--activations", f"0.5:{b}") for b in (16, 8, 4)},
}

WITH_DECAY = tuple(f"{kind}-muon-wd0.1" for kind in ("dense", "b16-tokens-whole", "b32-tokens-whole"))
FINAL: dict[str, tuple[str, ...]] = {
    **{name: SEARCH[name] for name in ("dense-adamw-lr0.01", "b32-literal", "b32-tokens-whole-taylor", "b32-cubic-taylor", "b32-rigl")},
    **{name: SEARCH[name] for name in ("b16-cubic-taylor", "b16-tokens-whole-taylor", "b16-tokens-whole-late", "b32-tokens-whole-late")},
    "dense-activations50": SEARCH["dense-activations50-x16"],
    "dense-activations50-x4": SEARCH["dense-activations50-x4"],
    **{name: SEARCH[name] for name in ("dense-muon", "b16-tokens-whole-muon", "b32-tokens-whole-muon", "b1-tokens-whole-muon")},
    **{name: SEARCH[name] for name in ("dense-muon-wd0.1", "b16-tokens-whole-muon-wd0.1")},
    **{f"{name}-taught": (*SEARCH[name], *TAUGHT) for name in ("dense-muon", "b16-tokens-whole-muon", "b32-tokens-whole-muon")},
    **{name: SEARCH[name] for name in ("b32-tokens-whole-muon-wd0.1", "b32-tokens-whole-muon-wd0.1-hysteresis")},
    **{f"{name}-taught": (*SEARCH[name], *TAUGHT_WD) for name in WITH_DECAY},
    **{f"{name}-bf16": (*SEARCH[name], *BF16) for name in WITH_DECAY},  # with --epochs 34 the 16x16 mask takes the FLOP of 20 dense epochs
    **{f"{name}-bf16-from-teacher": (*SEARCH[name], *FROM_TEACHER) for name in WITH_DECAY},
    **{f"{name}-bf16-taught": (*SEARCH[name], *TAUGHT_BF16) for name in WITH_DECAY},  # longer than 20 epochs, by a run as long
    "b16-tokens-whole-muon-wd0.1-bf16-from-teacher-fast": (*TOKENS_WHOLE_B16, *FREEZE, *FIFTH, *MUON, *CHANGES["wd0.1"], *TAYLOR, *FROM_TEACHER),
    "b16-tokens-whole-muon-wd0.1-bf16-fast": (*TOKENS_WHOLE_B16, *FREEZE, *FIFTH, *MUON, *CHANGES["wd0.1"], *TAYLOR, *BF16),
    "dense-d96-muon-wd0.1-bf16": (*SEARCH["dense-muon-wd0.1"], "--dim", "96", *BF16),
    # as many FLOP as half of the 16x16 blocks, ramp included (1.00 and 0.96 of them): a narrower model, and one of fewer hidden units
    "dense-d48-muon-wd0.1-bf16": (*SEARCH["dense-muon-wd0.1"], "--dim", "48", *BF16),
    "dense-e2-muon-wd0.1-bf16": (*SEARCH["dense-muon-wd0.1"], "--expansion", "2", *BF16),
    "dense-e2-adamw-lr0.01": (*SEARCH["dense-adamw-lr0.01"], "--expansion", "2"),  # the same beside AdamW's masks
    # the channel linears' weights that half of the 16x16 blocks has left when the ramp has ended: 280 of 640 blocks, as 112 of 256 hidden units have
    "dense-h112-muon-wd0.1-bf16": (*SEARCH["dense-muon-wd0.1"], "--hidden", "112", *BF16),
    "dense-h112-adamw-lr0.01": (*SEARCH["dense-adamw-lr0.01"], "--hidden", "112"),
    # twice as wide; masked, ramp included, its layers take the FLOP of dense-d96, and with Muon, which steps whole matrices, 6 % more
    "dense-d128-muon-wd0.1-bf16": (*SEARCH["dense-muon-wd0.1"], "--dim", "128", *BF16),
    "b16-tokens-whole-d128-muon-wd0.1-bf16": (*D128_HALF, *FREEZE, *HALF, *MUON, *CHANGES["wd0.1"], *TAYLOR, *BF16),
    **{f"{name}-bf16-taught-d96": (*SEARCH[name], *WIDE_TEACHER) for name in WITH_DECAY},
    "b16-activations50-x4": (*BOTH, *ADAMW, *FREEZE, *HALF, *LR, *TAYLOR),
}


def wide(dim: int, ratio: float, side: int, *more: str, tokens: bool = True) -> tuple[str, ...]:
    """A wider model in square blocks; `tokens`: its token mixing masked, too, where a block fits into it."""
    mixing = f"XPatch = masked {ratio} ({side}, {side}); " if tokens else ""
    return ("--dim", str(dim), "--config", f"ResMLP5 @ {mixing}XChannel = masked {ratio} ({side}, {side});", *ADAMW, *FREEZE, *more)


STATIC = ("--criterion", "random", "--refresh", "0", "--cover", "--gain")
GROW = (*RIGL, "--cover")
PART = ("--schedule", "cubic:{half},initial=0.5", *TAYLOR)  # from half of the blocks on
# accuracy at equal cost: dense widths draw the frontier, wider masked models lie beside it
ISOFLOP: dict[str, tuple[str, ...]] = {
    **{f"dense-d{dim}": ("--dense", *ADAMW, *LR, "--dim", str(dim)) for dim in (64, 32, 48, 24, 96, 16, 128)},
    "d128-b16-75-static": wide(128, 0.75, 16, "--lr", "0.005", *STATIC),
    "d128-b16-75-static-channels": wide(128, 0.75, 16, "--lr", "0.005", *STATIC, tokens=False),
    "d128-b16-75-rigl-channels": wide(128, 0.75, 16, "--lr", "0.005", *GROW, tokens=False),
    "d128-b16-80-part-channels": wide(128, 0.8, 16, "--lr", "0.005", *PART, tokens=False),
    "d96-b8-50-static-channels": wide(96, 0.5, 8, "--lr", "0.005", *STATIC, tokens=False),
    "d128-b8-90-static-channels": wide(128, 0.9, 8, "--lr", "0.005", *STATIC, tokens=False),
    "d192-b32-90-part-channels": wide(192, 0.9, 32, "--lr", "0.005", *PART, tokens=False),
    "d128-b32-75-static-channels": wide(128, 0.75, 32, "--lr", "0.005", *STATIC, tokens=False),
    "d128-b64-75-part-channels": wide(128, 0.75, 64, "--lr", "0.005", *PART, tokens=False),
    # a row that keeps a quarter of its inputs is as narrow as a dense one of width 32: the learning rate of those
    "d128-b16-75-static-lr0.01": wide(128, 0.75, 16, *LR, *STATIC),
    "d128-b8-90-static-channels-lr0.01": wide(128, 0.9, 8, *LR, *STATIC, tokens=False),
    "d96-b16-70-ramp-channels": wide(96, 0.7, 16, *LR, *HALF, *TAYLOR, tokens=False),  # the best recipe of the thesis' width, at the FLOP of dense-d64
    **{f"d96-b8-{round(100 * r)}-ramp-channels": wide(96, r, 8, *LR, *HALF, *TAYLOR, tokens=False) for r in (0.7, 0.8, 0.5)},
    "d128-b8-80-ramp-channels": wide(128, 0.8, 8, *LR, *HALF, *TAYLOR, tokens=False),
    "d96-b32-70-ramp-channels": wide(96, 0.7, 32, *LR, *HALF, *TAYLOR, tokens=False),
    "d128-b64-75-ramp-channels": wide(128, 0.75, 64, *LR, *HALF, *TAYLOR, tokens=False),
    # the ends of the range: nine tenths of the blocks masked, and half of the largest ones
    **{f"d128-b{side}-90-ramp-channels": wide(128, 0.9, side, *LR, *HALF, *TAYLOR, tokens=False) for side in (32, 16)},
    "d128-b64-50-ramp-channels": wide(128, 0.5, 64, *LR, *HALF, *TAYLOR, tokens=False),
    **{f"d{dim}-b8-50-ramp-channels": wide(dim, 0.5, 8, *LR, *HALF, *TAYLOR, tokens=False) for dim in (64, 48, 32)},
    # what a ramp leaves of the hidden layers, dense from the first step: fewer hidden units; no part of the frontier, but judged by it
    **{f"dense-d{dim}-e{e}": ("--dense", *ADAMW, *LR, "--dim", str(dim), "--expansion", str(e)) for dim, e in ((64, 2), (96, 2), (96, 1))},
}

# the thesis' recipe at its length (its table 5.1: 200 epochs, MixUp and CutMix, Adam, masks from epoch 10), its two literal modes, and ours beside dense.
# Blocks by the norm of its text; that of its code, --criterion spectral, is an SVD, which no CUDA graph holds
TABLE_5_1 = ("--warmup", "5", "--cooldown", "10", "--mix-prob", "1", *LR)
FROM_10 = (*TABLE_5_1, "--masks-from", "10")
MUON_WD, TAUGHT_200 = (*MUON, *CHANGES["wd0.1"]), ("--teacher", "{runs}/thesis/thesis-dense-muon-seed{seed}")
BY_MUON = {"dense": ("--dense",), **{f"b32-{percent}": (*where, *FREEZE, *HALF, *TAYLOR) for percent, where in ((80, TOKENS_WHOLE), (50, tokens_whole(32)))}}
THESIS: dict[str, tuple[str, ...]] = {
    "thesis-dense": (*TABLE_5_1, "--dense", *ADAM),
    "thesis-literal-masked": (*FROM_10, *B32, *ADAM, *FREE),
    "thesis-literal-unmasked": (*FROM_10, *B32, *ADAM, *FREE, "--backward", "unmasked"),
    "thesis-dense-adamw": (*TABLE_5_1, "--dense", *ADAMW),
    "thesis-b32-80": (*TABLE_5_1, *TOKENS_WHOLE, *ADAMW, *FREEZE, *HALF, *TAYLOR),
    "thesis-b32-50": (*TABLE_5_1, *tokens_whole(32), *ADAMW, *FREEZE, *HALF, *TAYLOR),
    # the optimiser that 20 epochs were best with, on both sides; and both taught by that dense run
    **{f"thesis-{name}-muon": (*TABLE_5_1, *MUON_WD, *what) for name, what in BY_MUON.items()},
    **{f"thesis-{name}-muon-taught": (*TABLE_5_1, *MUON_WD, *what, *TAUGHT_200) for name, what in BY_MUON.items()},
}


def arguments_of(name: str, epochs: int, seed: int = 0, runs: Path = Path("runs/accuracy")) -> list[str]:
    """The arguments of a recipe for a run of so many epochs; where it has a teacher, that of its seed, among these runs."""
    lengths = {"half": f"{epochs / 2:g}ep", "fifth": f"{epochs / 5:g}ep"}
    lengths |= {"late": f"{epochs * 0.75:g}ep", "third": f"{epochs / 3:.6g}", "sixth": f"{epochs / 6:.6g}ep"}
    lengths |= {"most": f"{epochs * 0.45:.6g}", "rest": f"{epochs * 0.05:.6g}ep"}
    lengths |= {"seed": str(seed), "runs": str(runs)}
    return [word.format(**lengths) if "{" in word else word for word in {**SEARCH, **FINAL, **ISOFLOP, **THESIS}[name]]
