"""Types of the commands' parameters: accepted values, and their completion in a shell."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import click
from click.shell_completion import CompletionItem

from edgert.cli.quantity import Quantity
from edgert.errors import ConfigInvalid, EdgeRTError
from edgert.names import CHANNEL_NAME, CHANNEL_NAME_RULE
from edgert.toml_file import refuse_pipe
from edgert_deploy.common.project import find_bundle, find_project, takes_default
from edgert_deploy.common.quantities import rate_bytes_per_s, size_bytes


class Number(click.FloatRange):
    """A number within limits. click's own type accepts `nan`, because no comparison with `nan` is true."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(value, param, ctx)
        if math.isnan(number):
            self.fail(f"{value!r} is not a number: give one such as 0.5", param, ctx)
        return number


class FilePath(click.Path):
    """A path that is not a named pipe or a device, because opening a named pipe waits for a writer.

    The pipe of a shell's `<(command)` is accepted.
    """

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        path = super().convert(value, param, ctx)
        refuse_pipe(Path(os.fsdecode(path)))
        return path


FILE = FilePath(dir_okay=False, path_type=Path)
FILE_NAME = FilePath(dir_okay=False, path_type=str)  # "" for none


class FolderPath(click.Path):
    """A folder, which need not exist. An empty text would be the working folder, so it is refused.

    A script passes an empty text if its variable is not set.
    """

    def __init__(self) -> None:
        super().__init__(file_okay=False)
        self.name = "dir"  # for --help

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        if not str(value):
            self.fail("it is empty: give a folder", param, ctx)
        path = Path(os.fsdecode(super().convert(value, param, ctx)))
        if path.exists() and not path.is_dir():
            self.fail(f"{path} is not a folder: give a folder, or the name of a new one", param, ctx)
        return path


def Size(least_bytes: int) -> Quantity:
    """`500KB`, `2MB` or `20GB`, as bytes."""
    return Quantity("size", size_bytes, lambda size: f"{size / 1e6:g}MB", least_bytes, float("inf"))


def Rate(least_bytes_per_s: float) -> Quantity:
    """`500KB/s` or `2MB/s`, as bytes a second."""
    return Quantity("rate", rate_bytes_per_s, lambda rate: f"{rate / 1e3:g}KB/s", least_bytes_per_s, float("inf"))


class DeviceShare(click.ParamType):  # type: ignore[type-arg]  # generic in new versions of click alone
    """A share of all devices, such as 5%, as a number from 0 to 1."""

    name = "share"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        if isinstance(value, float):
            return value
        match = re.fullmatch(r"(\d{1,3}(?:\.\d{1,6})?)%", value.strip())
        if match is None or not 0 < float(match[1]) <= 100:
            self.fail(f"{value!r} is not a share of the devices: give 5%, 50% or 100%", param, ctx)
        return float(match[1]) / 100


class DeviceCount(click.IntRange):
    """A number of devices; names of devices are refused with advice."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, str) and not value.lstrip("-").isdigit():
            self.fail(
                f"{value[:80]!r} is not a number of devices. To choose the devices, deploy to them first, and then to all: "
                "edgert deploy BUNDLE SELECTOR",
                param,
                ctx,
            )
        return int(super().convert(value, param, ctx))


class ChannelName(click.types.StringParamType):
    name = "channel"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        if not CHANNEL_NAME.fullmatch(value):
            self.fail(f"{value[:80]!r} is not a name of a channel: {CHANNEL_NAME_RULE}", param, ctx)
        return str(value)


class Selector(click.types.StringParamType):
    """Devices of the inventory, as `devices.inventory.select` reads them."""

    name = "selector"
    hint_about_more = "Separate several devices by commas: pi-1,pi-2"

    def get_missing_message(self, param: click.Parameter, ctx: click.Context | None) -> str:
        once = ", or write them once as `selector` in the project's edgert.toml (edgert init)"
        command = ctx.command_path.partition(" ")[2] if ctx else ""
        return f"Give names, groups or `all`{once if takes_default(command, 'selector') else ''}."

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """Complete the last word of a list with commas."""
        before, comma, word = incomplete.rpartition(",")
        without = "!" if word.startswith("!") else ""
        return [
            CompletionItem(before + comma + without + each)
            for each in _matching(_selectable(ctx), word.removeprefix("!"))
        ]


class OneDevice(Selector):
    hint_about_more = ""

    def get_missing_message(self, param: click.Parameter, ctx: click.Context | None) -> str:
        return "Give the name of a device: edgert device list shows the names."


class ModelName(click.types.StringParamType):
    """A model's name. A shell completes the names of models that the team deployed."""

    name = "model"

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        return [CompletionItem(name) for name in _matching(_models(), incomplete)]


class ModelOrBundle(click.Path):
    """The name of a model, or the path of a bundle: a name that ends in .edgert, or a file."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str | Path:
        path = Path(value)
        try:
            bundle = find_bundle(path)
        except ConfigInvalid:
            if path.suffix == ".edgert":
                raise
            return str(value)
        return bundle if bundle.suffix == ".edgert" or bundle.is_file() else str(value)

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        return [*ModelName().shell_complete(ctx, param, incomplete), CompletionItem(incomplete, type="file")]


class ProfileName(click.types.StringParamType):
    name = "profile"

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        from edgert_deploy.devices.profiles import list_profiles

        try:
            profiles = list_profiles(ctx.params.get("profiles_dir") or find_project().profiles)
        except EdgeRTError:
            return []
        return [
            CompletionItem(profile.name, help=profile.description)
            for profile in profiles
            if profile.name.startswith(incomplete)
        ]


class BundlePath(click.Path):
    """A bundle to read. A name without a path may also be a file in the project's folder of bundles."""

    def __init__(self) -> None:
        super().__init__(path_type=Path)
        self.name = "file"  # for --help

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        return find_bundle(Path(os.fsdecode(super().convert(value, param, ctx))))


class NewBundlePath(BundlePath):
    """A bundle to write. A name without a path is put into the project's bundle folder, if there is one."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        path = Path(os.fsdecode(click.Path.convert(self, value, param, ctx)))
        bundles = find_project().bundles if path.parent == Path() else None
        if bundles is None:
            return path
        bundles.mkdir(parents=True, exist_ok=True)
        return bundles / path


def _matching(names: Iterable[str], beginning: str) -> list[str]:
    return sorted({name for name in names if name.startswith(beginning)})


def _selectable(ctx: click.Context) -> list[str]:
    """Return every word that selects devices, or no word if the inventory is invalid."""
    from edgert_deploy.devices.selector import ALL

    inventory = ctx.params.get("inventory")
    try:
        devices = [] if inventory is None else inventory.devices()
    except EdgeRTError:
        return []
    words = [
        word
        for device in devices
        for word in (device.name, *device.groups, f"site:{device.site}", f"profile:{device.profile}")
    ]
    tags = [f"tag:{tag}" for device in devices for tag in device.tags]
    return [*words, *tags, *([ALL] if devices else [])]


def _models() -> list[str]:
    from edgert_deploy.rollout.rollout_store import RolloutStore

    return [rollout.model for rollout in RolloutStore(find_project().rollouts).all()]
