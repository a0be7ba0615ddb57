"""An operation of two tensors: a description, a definition and a launch; test_operation.py holds operation.py to it."""

from typing import NamedTuple

import torch

from deep_tile.operation import Arg, Described


class Options(NamedTuple):
    num_sms: int | None = None


class RowSums(Described):
    Options = Options
    launched = None

    def define(self, given, options):
        x, out = given
        out.copy_(x.float().sum(1))

    def prepare(self, given, options):
        return self.launched(given, options)


ROW_SUMS = RowSums(
    "toy_row_sums", "x out!", "num_sms", (Arg("r n", (torch.bfloat16, torch.float32), True), Arg("r", (torch.float32,)))
)


def row_sums(x, out=None, *, num_sms=None):
    return ROW_SUMS.run((x, out), (num_sms,))
