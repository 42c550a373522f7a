"""transformers: whole prompts in padded batches, the longest first; it keeps no KV between questions."""

from __future__ import annotations

import os
from typing import Any

from serving import Request, run_by_steps, serve

BATCH = 16
"""Prompts a batch."""


class Transformers:
    """The model as `AutoModelForCausalLM` loads it."""

    def boot(self, message: dict[str, Any]) -> dict[str, Any]:
        """Loads the model and answers one prompt."""
        os.environ["HF_HUB_OFFLINE"] = "1"
        import torch
        import transformers

        torch.set_num_threads(message["threads"])
        self.model = transformers.AutoModelForCausalLM.from_pretrained(
            message["folder"], dtype=getattr(torch, message["dtype"])
        ).eval()
        self.answer([Request(0, 0, message["prompt"])], [message["answers"]])
        return {
            "engine": f"transformers {transformers.__version__}",
            "settings": {"batch": BATCH, "torch": torch.__version__, "dtype": message["dtype"]},
        }

    def forget(self) -> None:
        """Nothing is kept."""

    def run(self, message: dict[str, Any]) -> dict[str, Any]:
        """Answers a workload."""
        return run_by_steps(message, self.answer)

    def answer(self, requests: list[Request], readout: list[list[int]]) -> tuple[list[int], int]:
        """The index of the greatest answer of each prompt, and the rows computed, padding included."""
        import torch

        found, computed = [-1] * len(requests), 0
        order = sorted(range(len(requests)), key=lambda index: -len(requests[index].ids))
        with torch.inference_mode():
            for start in range(0, len(order), BATCH):
                batch = order[start : start + BATCH]
                longest = len(requests[batch[0]].ids)
                padding = [longest - len(requests[index].ids) for index in batch]
                pairs = list(zip(padding, batch, strict=True))
                ids = torch.tensor([[0] * n + requests[index].ids for n, index in pairs])
                mask = torch.tensor([[0] * n + [1] * (longest - n) for n in padding])
                positions = (mask.cumsum(1) - 1).clamp(min=0)
                logits = self.model(
                    ids, attention_mask=mask, position_ids=positions, logits_to_keep=1, use_cache=False
                ).logits[:, 0]
                best = torch.stack([logits[:, answer].amax(1) for answer in readout], 1).argmax(1)
                for index, answer in zip(batch, best.tolist(), strict=True):
                    found[index] = answer
                computed += ids.numel()
        return found, computed


if __name__ == "__main__":
    serve(Transformers())
