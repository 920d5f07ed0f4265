"""Evaluation metrics, weighted by tokens over batches and ranks (layer L)."""

import math

import torch
from torch import Tensor
from torchmetrics import Metric


class TokenLoss(Metric):
    """Loss per token over a whole data set, with its standard error.

    States are sums in float64, so that batch sizes, their order and the number of ranks do not matter. `update` takes what a
    batch gives: the sum of its token losses (nats) and the number of its tokens; `compute` returns a dict with

    - `loss`: nats per token, (sum of losses) / (tokens);
    - `ppl`: its exponential;
    - `tokens`: how many there were;
    - `loss_stderr`: standard error of `loss` as a ratio estimate over the B batches seen (Cochran 1977, section 6.4):
      sqrt(sum_b (S_b - loss n_b)^2 * B / (B - 1)) / tokens. It takes batches as independent, and shrinks as 1 / sqrt(B).

    What is unknown is left out: everything but `tokens` without a token, the error with one batch.
    """

    full_state_update = False
    loss_sum: Tensor
    tokens: Tensor
    batches: Tensor
    sum_ss: Tensor
    sum_sn: Tensor
    sum_nn: Tensor

    def __init__(self) -> None:
        super().__init__()
        for name in ("loss_sum", "sum_ss", "sum_sn", "sum_nn"):
            self.add_state(name, torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")
        for name in ("tokens", "batches"):
            self.add_state(name, torch.zeros((), dtype=torch.int64), dist_reduce_fx="sum")

    def update(self, loss_sum: Tensor, num_tokens: Tensor) -> None:
        """Add one batch: sum of its token losses in nats, number of its tokens."""
        s, n = loss_sum.detach().to(torch.float64), num_tokens.to(torch.float64)
        # .double(): setting FSDP up casts the states to fp32, in which the squares below would cancel to nothing.
        self.loss_sum = self.loss_sum.double() + s
        self.tokens += num_tokens
        self.batches += (n > 0).to(torch.int64)
        self.sum_ss = self.sum_ss.double() + s * s
        self.sum_sn = self.sum_sn.double() + s * n
        self.sum_nn = self.sum_nn.double() + n * n

    def compute(self) -> dict[str, float]:
        """Return the values named in the class docstring."""
        n, batches = int(self.tokens), int(self.batches)
        if n == 0:
            return {"tokens": 0}
        loss = float(self.loss_sum) / n
        out: dict[str, float] = {"loss": loss, "ppl": math.exp(loss) if loss < 700 else math.inf, "tokens": n}
        if batches > 1:
            squares = float(self.sum_ss - 2 * loss * self.sum_sn + loss * loss * self.sum_nn)
            out["loss_stderr"] = math.sqrt(max(squares, 0.0) * batches / (batches - 1)) / n
        return out
