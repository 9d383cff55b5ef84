"""One rank of ``autosp check``: ``python -m autosp.cli.check_rank settings.json``."""

from __future__ import annotations

import inspect
import json
import os
import sys
import traceback
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from autosp.cli.check import CheckSettings
from autosp.cli.progress import Silent, reporter


def main(path: str) -> None:
    """Run every case and have rank 0 write the rows; the launcher reads the error file where a rank fails."""
    from torch.distributed.elastic.multiprocessing.errors import get_error_handler

    handler = get_error_handler()
    handler.initialize()
    settings = CheckSettings(**json.loads(Path(path).read_text()))
    speaks = reporter(os.environ.get("RANK") == "0" and "AUTOSP_QUIET" not in os.environ, to_stderr=True)
    try:
        with speaks.stage("Importing torch and transformers"):
            from autosp.cli import worker
        worker.quiet_libraries()
        rows = run(settings, speaks)
        if os.environ["RANK"] == "0":
            Path(settings.result).write_text(json.dumps(rows))
    except KeyboardInterrupt:
        os._exit(130)
    except Exception as error:
        if settings.debug:
            traceback.print_exception(error)
        cause, code = worker.exit_code(error)
        handler.record_exception(cause)
        sys.stdout.flush()
        # not an exception: the interpreter's end would wait for collectives that the other ranks no longer join
        os._exit(code)


def run(settings: CheckSettings, speaks: Silent) -> list[dict[str, Any]]:
    """Return one row a case, the same on every rank."""
    import torch
    import torch.distributed as dist

    import autosp
    from autosp.checking import Checker
    from autosp.cli.model_spec import load_example

    rows: list[dict[str, Any]] = []
    for config in settings.configs:
        torch._dynamo.reset()
        with warnings.catch_warnings():
            # the check shards the head of a copy by itself
            warnings.filterwarnings("ignore", message="tensor_parallel.vocab_parallel_lm_head is set")
            state = autosp.initialize(config, device_type=settings.device)
        mesh = f"dp {state.sizes['dp']} x sp {state.sizes['sp']}"
        if state.sizes.get("tp", 1) > 1:
            mesh += f" x tp {state.sizes['tp']}"
        with speaks.stage(f"Making the model for {mesh}"):
            example = load_example(settings.model, layers=settings.layers, rows=settings.rows)
            model = example.model.to(torch.device(settings.device, int(os.environ.get("LOCAL_RANK", 0))))
            model = model.double() if settings.dtype == "fp64" else model
            if not settings.masks_asked and settings.masks != ["none"] and not _takes_mask(model):
                settings.masks = ["none"]
                speaks.line("its forward names no attention_mask: cases with masks are left out, but for --masks")
            cases = list(_cases(settings))
            checker = Checker(model, rtol=settings.rtol, options=_options(settings, config))
        for number, (length, labels, mask) in enumerate(cases, 1):
            # each data-parallel group has a batch of its own, every rank of a sequence group the same
            torch.manual_seed(1000 * state.coordinates["dp"] + length)
            batch = _batch(dict(example.batch(length)), labels, mask, model)
            with speaks.stage(f"{mesh}: case {number} of {len(cases)}, {length} tokens, {labels}, mask {mask}") as tell:
                with torch.autocast(settings.device, dtype=torch.bfloat16, enabled=settings.dtype == "bf16"):
                    result = checker.run(batch, steps=settings.steps)
                tell(result.verdict)
            rows.append({"mesh": mesh, "tokens": length, "labels": labels, "mask": mask, **result.as_dict()})
    dist.destroy_process_group()
    return rows


def _options(settings: CheckSettings, config: dict[str, Any]) -> dict[str, Any]:
    chosen = {"inner_backend": settings.inner_backend}
    return {**chosen, **{k: v for k, v in config.get("autosp", {}).items() if k == "inner_backend"}}


def _takes_mask(model: Any) -> bool:
    return "attention_mask" in inspect.signature(model.forward).parameters


def _cases(settings: CheckSettings) -> Iterator[tuple[int, str, str]]:
    """Every pattern of labels without a mask, and every mask with all labels, at each length."""
    for length in settings.lengths:
        for mask in settings.masks:
            for labels in settings.labels if mask == "none" else settings.labels[:1]:
                yield length, labels, mask


def _batch(batch: dict[str, Any], labels: str, mask: str, model: Any) -> dict[str, Any]:
    """The batch with ignored labels and padding as asked for; padded positions have ignored labels."""
    import torch

    ids = batch.get("input_ids")
    target = batch.get("labels")
    if labels != "all" and isinstance(target, torch.Tensor) and target.dim() >= 2:
        length = target.shape[1]
        if labels == "prompt-ignored":
            target[:, : length // 2] = -100
        else:
            target[:, :-1] = -100
    if mask != "none" and isinstance(ids, torch.Tensor) and "attention_mask" not in batch:
        length = ids.shape[1]
        padding = 0 if mask == "ones" else min(5, length - 1)
        attention = torch.ones_like(ids)
        hidden = slice(length - padding, length) if mask == "right-padding" else slice(0, padding)
        attention[0, hidden] = 0
        batch["attention_mask"] = attention
        if isinstance(target, torch.Tensor):
            target[attention == 0] = -100
    weight = next(model.parameters())
    wide = weight.dtype == torch.float64
    return {
        k: v.to(weight.device, torch.float64 if wide and v.is_floating_point() else None)
        if isinstance(v, torch.Tensor)
        else v
        for k, v in batch.items()
    }


if __name__ == "__main__":
    main(sys.argv[1])
