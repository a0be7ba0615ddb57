"""As deep_tile/__init__.pyi."""

from deep_tile.integrations import peft as peft
from deep_tile.integrations import sglang as sglang
from deep_tile.integrations import torchtitan as torchtitan
from deep_tile.integrations import transformers as transformers
from deep_tile.integrations import vllm as vllm
