"""`jitllm profile`: look at a placement profile before running with it."""

import dataclasses
from typing import Annotated, Literal

from tyro.conf import OmitArgPrefixes, arg

from jitllm.cli.options import EngineOptions
from jitllm.errors import UsageError

_DEFAULT_ENGINE = EngineOptions()


def profile(
    action: Literal["check", "show"],
    file: Annotated[str | None, arg(help_behavior_hint="(optional)")] = None,
    model: Annotated[str | None, arg(help_behavior_hint="(optional)")] = None,
    /,
    *,
    engine: OmitArgPrefixes[EngineOptions] = _DEFAULT_ENGINE,
) -> None:
    """Check a placement profile against a model, or show what profile and flags come to.

    Args:
        action: `check FILE MODEL` prints the plan or what is wrong; `show [FILE]` prints YAML.
        file: The profile.
        model: A container (.jlm), a GGUF (converted once into the cache) or a catalog name.
    """
    if file is not None:
        engine = dataclasses.replace(engine, profile=file)
    if action == "show":
        if model is not None:
            raise UsageError(f"profile show takes FILE, but {model!r} follows")
        from jitllm.placement.profile import profile_hash, to_yaml

        effective = engine.effective_profile()
        print(f"# hash {profile_hash(effective)}\n{to_yaml(effective)}", end="")
        return
    if model is None:
        raise UsageError("profile check needs FILE and MODEL")
    print(engine.prospect(model).plan.render())
