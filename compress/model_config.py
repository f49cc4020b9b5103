"""transformers' configuration object of a checkpoint, for everything that builds model code.

The class is the checkpoint's own where its code is trusted, and transformers' otherwise; the values are those of
config.json as it was read, which may differ from the file's, without what it says about quantization.
"""

from typing import Any

from transformers import AutoConfig

from compress.checkpoint import BLOCKS, Checkpoint
from compress.errors import CheckpointError

__all__ = ["model_config"]


def model_config(checkpoint: Checkpoint, *, trust_remote_code: bool) -> Any:
    """Build it; `name_or_path` is where its code lies.

    Raises:
        CheckpointError: an architecture that transformers does not know, and no trusted code for it.
    """
    try:
        cls = type(AutoConfig.from_pretrained(checkpoint.path, trust_remote_code=trust_remote_code))
    except ValueError as error:
        fix = ": set trust_remote_code to run its own code" if "auto_map" in checkpoint.config else ""
        model_type = checkpoint.config.get("model_type")
        raise CheckpointError(
            f"transformers does not know model_type {model_type!r} of {checkpoint.path}{fix}"
        ) from error
    config = cls.from_dict({key: value for key, value in checkpoint.config.items() if key not in BLOCKS})
    config.name_or_path = str(checkpoint.path)
    return config
