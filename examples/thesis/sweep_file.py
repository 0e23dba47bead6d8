"""A sweep file, in YAML or JSON: read, checked, and expanded into runs of train.py.

Sections: `hp`, the grid; `fixed`, what all runs share, under the thesis' names; `train` (ours), any other option of train.py; `meta` and `sbatch`, how the
sweep is run. `hp` has `model_config`, a list of the thesis' configuration strings, and may have (ours) lists of any option of train.py, such as `backward` and
`seed`, and lists of `block` and `ratio`, which stand in for {block} and {ratio} in the strings. Every seed runs the whole grid, on the same batches.

All scalars are read as text and typed here: YAML itself reads 1e-4 as a word, 24:00:00 as 86400, and the later of two equal keys.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import re
from argparse import Namespace
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from fxmask import FxMaskError
from thesis import masked_model, train
from thesis.config import ThesisConfig, ThesisConfigError, parse
from thesis.sweep_checks import SweepError, kind, known, pairs, text
from thesis.sweep_fixed import KEYS as FIXED
from thesis.sweep_fixed import agree, arguments_of

SECTIONS = ("hp", "fixed", "train", "meta", "sbatch")
META = ("run", "gpus", "mode", "prefix", "sandbox", "script")
SBATCH = ("partition", "gpus", "cpus-per-task", "mem", "export", "time", "chdir")
OWN = ("model_config", "block", "ratio")  # of hp
LISTS = {"backward": ["masked"], "seed": ["0"]}  # of hp, where the file has none
SET_BY_SWEEP = ("config", "dense", "out", "fresh", "stop", "device", "no_figures", "hidden")  # options of train.py that no file sets; tables know no hidden


@dataclass(frozen=True)
class Job:
    """One run: its folder's name, and the arguments of train.py but for --out."""

    name: str
    arguments: tuple[str, ...]
    config: ThesisConfig
    settings: dict[str, str] = field(compare=False)  # of the grid

    def namespace(self, *more: str) -> Namespace:
        return train.arguments([*self.arguments, *more])


@dataclass(frozen=True)
class Sweep:
    """A checked file."""

    path: Path
    jobs: tuple[Job, ...]
    meta: dict[str, str]
    sbatch: dict[str, str]


def read(path: Path) -> Sweep:
    """Read, check and expand a sweep file.

    Raises:
        SweepError: anything in it that cannot be meant; nothing has been run then.
    """
    try:
        return expand(path, check(parsed(path)))
    except SweepError as error:
        raise SweepError(f"{path}: {error}") from None


def parsed(path: Path) -> Any:
    """The file as dicts, lists and text."""
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no text"
        raise SweepError(f"expected a sweep file, got none that can be read ({why}).\n  fix: examples/thesis/sweeps has some.") from None
    if path.suffix == ".json":
        try:
            return json.loads(text, parse_float=str, parse_int=str, object_pairs_hook=pairs)
        except json.JSONDecodeError as error:
            raise SweepError(f"expected JSON, got {error}.") from None
    try:
        import yaml
    except ImportError as error:
        what = f"YAML files need PyYAML, which cannot be imported: {error}"
        raise SweepError(f"{what}.\n  fix: pip install PyYAML, or write the sweep as .json.") from None

    class Loader(yaml.BaseLoader):
        pass

    Loader.add_constructor("tag:yaml.org,2002:map", lambda loader, node: pairs(loader.construct_pairs(node, deep=True)))
    try:
        return yaml.load(text, Loader)  # a BaseLoader makes text, lists and dicts, and nothing else
    except yaml.YAMLError as error:
        raise SweepError(f"expected YAML, got {' '.join(str(error).split())}.") from None


def check(tree: Any) -> dict[str, dict[str, Any]]:
    """The five sections, empty where the file has none; `hp.x` at the top level is `x` of hp."""
    if not isinstance(tree, dict):
        raise SweepError(f"expected the sections {', '.join(SECTIONS)}, got {kind(tree)}.")
    dotted = {key: value for key, value in tree.items() if key.startswith("hp.")}
    tree = {key: value for key, value in tree.items() if key not in dotted}
    known("the file", tree, (*SECTIONS, "hp.model_config"))
    sections = {name: tree.get(name) or {} for name in SECTIONS}
    for name, section in sections.items():
        if not isinstance(section, dict):
            raise SweepError(f"{name}: expected keys with values, got {kind(section)}.")
    sections["hp"] = pairs([*sections["hp"].items(), *((key[3:], value) for key, value in dotted.items())])
    options = [name for name in defaults_of_train() if name not in SET_BY_SWEEP]
    shared = [name for name in options if name not in LISTS]
    for name, expected in (("hp", [*OWN, *options]), ("fixed", FIXED), ("train", shared), ("meta", META), ("sbatch", SBATCH)):
        known(name, sections[name], expected)
    for name in ("fixed", "train", "meta", "sbatch"):
        for key, value in sections[name].items():
            if isinstance(value, dict | list):
                raise SweepError(f"{name}.{key}: expected one value, got {kind(value)}.\n  fix: lists of values belong into hp.")
        sections[name] = {key: text(value) for key, value in sections[name].items() if text(value)}
    return sections


def grid(hp: dict[str, Any]) -> dict[str, list[str]]:
    """Each list of the grid, its values checked."""
    lists: dict[str, list[str]] = {}
    for key, values in hp.items():
        if not isinstance(values, list) or not values:
            raise SweepError(f"hp.{key}: expected a list of values, got {kind(values)}.\n  fix: write [a, b, ...], of one value [a].")
        for value in values:
            if isinstance(value, dict | list):
                raise SweepError(f"hp.{key}: expected single values in the list, got {kind(value)}.")
        lists[key] = [text(value) for value in values]
        twice = next((value for value in lists[key] if lists[key].count(value) > 1), None)
        if twice is not None:
            raise SweepError(f"hp.{key}: expected each value once, got {twice!r} twice.")
    if "model_config" not in lists:
        example = '["ResMLP5 @ XPatch = masked 0.8 (32, 32);"]'
        raise SweepError(f"hp: expected model_config, a list of configuration strings, got none.\n  fix: model_config: {example}")
    for key, form, what in (("block", r"[0-9]+x[0-9]+", "blocks such as 16x16"), ("ratio", r"0?\.[0-9]+|0", "ratios in [0, 1), such as 0.8")):
        for value in lists.get(key, ()):
            if not re.fullmatch(form, value):
                raise SweepError(f"hp.{key}: expected {what}, got {value!r}.")
        used = [config for config in lists["model_config"] if f"{{{key}}}" in config]
        if bool(used) != (key in lists):
            expected = f"a list of them beside {used[0]!r}" if used else f"{{{key}}} in model_config"
            raise SweepError(f"hp.{key}: expected {expected}, got none.\n  fix: the two belong together.")
    return {"model_config": lists.pop("model_config"), **LISTS, **lists}


def configurations(lists: dict[str, list[str]]) -> list[str]:
    """The configuration strings, with every block and ratio put in."""
    found = []
    for config in lists["model_config"]:
        inner = [lists[key] if f"{{{key}}}" in config else [""] for key in ("block", "ratio")]
        for block, ratio in itertools.product(*inner):
            found.append(config.replace("{block}", f"({block.replace('x', ', ')})").replace("{ratio}", ratio))
    return found


def expand(path: Path, sections: dict[str, dict[str, Any]]) -> Sweep:
    """The runs, seeds outermost. A dense model has no backward mode, and is one run."""
    lists = grid(sections["hp"])
    shared = [*arguments_of(sections["fixed"]), *options_of("train", sections["train"])]
    options = {key: values for key, values in lists.items() if key not in OWN}
    jobs: dict[tuple[str, ...], Job] = {}
    for seed in options.pop("seed"):
        for config in configurations(lists):
            masks = understood(config)
            for values in itertools.product(*options.values()):
                settings = {"seed": seed, **dict(zip(options, values, strict=True))}
                if not masks.items:
                    del settings["backward"]
                own = [word for key, value in settings.items() for word in options_of("hp", {key: value})]
                arguments = (*shared, *own, "--config", config)
                once(arguments)
                varied = [f"{key}{value or 'none'}" for key, value in settings.items() if key not in ("seed", "backward") and len(options[key]) > 1]
                name = "-".join([name_of(masks), *([settings["backward"]] if masks.items else []), *varied, f"seed{seed}"])
                jobs.setdefault(arguments, Job(re.sub(r"[^\w.-]+", "_", name), arguments, masks, {**settings, "model_config": config}))
    names = [job.name for job in jobs.values()]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise SweepError(f"hp.model_config: expected configurations that mean different masks, got two that are {twice!r}.\n  fix: remove one of them.")
    for job in jobs.values():
        agree(sections["fixed"], checked(job))
    return Sweep(path, tuple(jobs.values()), sections["meta"], sections["sbatch"])


def understood(config: str) -> ThesisConfig:
    try:
        return parse(config)
    except ThesisConfigError as error:
        raise SweepError(f"hp.model_config: {error}") from None


def name_of(masks: ThesisConfig) -> str:
    """ "32x32-0.8" where all masks are alike in the thesis' three linears, else all items."""
    forms = {(item.form, item.ratio, item.block) for item in masks.items}
    if len(forms) == 1 and len({p for item in masks.items for p in item.patterns}) == 3 and masks.items[0].form == "masked":
        ((_, ratio, block),) = forms
        return f"{block[0]}x{block[1]}-{ratio:g}"
    items = [f"{i.layer}.{i.form}.{i.block[0]}x{i.block[1]}.{i.ratio:g}" for i in masks.items]
    return "-".join([f"{masks.model}{masks.depth}", *(items or ["dense"])])


@cache
def defaults_of_train() -> dict[str, Any]:
    """Every option of train.py, with its default."""
    return vars(train.arguments([]))


def options_of(where: str, values: dict[str, str]) -> list[str]:
    """Options of train.py; a flag takes true or false."""
    defaults, words = defaults_of_train(), []
    for key, value in values.items():
        option = f"--{key.replace('_', '-')}"
        if defaults[key] is False:
            if value.lower() not in ("true", "false"):
                raise SweepError(f"{where}.{key}: expected true or false, got {value!r}.")
            words += [option] if value.lower() == "true" else []
        elif value:
            words += [option, value]
    return words


def once(arguments: tuple[str, ...]) -> None:
    """No option comes from two sections: the later would win in silence."""
    options = [word for word in arguments if word.startswith("--")]
    twice = next((option for option in options if options.count(option) > 1), None)
    if twice is not None:
        raise SweepError(f"{twice} of train.py: expected it from one of hp, fixed and train, got it from two.\n  fix: remove one of them.")


def checked(job: Job) -> Namespace:
    """The run's arguments as train.py understands them; what it says against them is the error."""
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            args = job.namespace()
        masked_model.check(args)
        return args
    except (SystemExit, FxMaskError) as error:
        what = said.getvalue().strip().split("\n")[-1].rpartition("error: ")[2] or str(error).rstrip(".")
        raise SweepError(f"run {job.name}: {what}.\n  where: an option of train.py, from hp, fixed or train\n  fix: correct the value.") from None
