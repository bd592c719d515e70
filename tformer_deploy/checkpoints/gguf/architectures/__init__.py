"""One file with one table for each architecture; this is where a new one is registered."""

from tformer_deploy.checkpoints.gguf.architectures.bloom import BLOOM
from tformer_deploy.checkpoints.gguf.architectures.command_r import COMMAND_R
from tformer_deploy.checkpoints.gguf.architectures.falcon import FALCON
from tformer_deploy.checkpoints.gguf.architectures.gemma import GEMMA
from tformer_deploy.checkpoints.gguf.architectures.gemma2 import GEMMA2
from tformer_deploy.checkpoints.gguf.architectures.gemma3 import GEMMA3
from tformer_deploy.checkpoints.gguf.architectures.gpt2 import GPT2
from tformer_deploy.checkpoints.gguf.architectures.gptj import GPTJ
from tformer_deploy.checkpoints.gguf.architectures.gptneox import GPTNEOX
from tformer_deploy.checkpoints.gguf.architectures.granite import GRANITE
from tformer_deploy.checkpoints.gguf.architectures.llama import LLAMA
from tformer_deploy.checkpoints.gguf.architectures.olmo2 import OLMO2
from tformer_deploy.checkpoints.gguf.architectures.phi2 import PHI2
from tformer_deploy.checkpoints.gguf.architectures.phi3 import PHI3
from tformer_deploy.checkpoints.gguf.architectures.qwen2 import QWEN2
from tformer_deploy.checkpoints.gguf.architectures.qwen3 import QWEN3
from tformer_deploy.checkpoints.gguf.architectures.smollm3 import SMOLLM3
from tformer_deploy.checkpoints.gguf.architectures.stablelm import STABLELM
from tformer_deploy.checkpoints.gguf.architectures.starcoder import STARCODER
from tformer_deploy.checkpoints.gguf.architectures.starcoder2 import STARCODER2

# By the value of ``general.architecture``.
ARCHITECTURES = {
    "llama": LLAMA, "qwen2": QWEN2, "qwen3": QWEN3, "gemma": GEMMA, "gemma2": GEMMA2, "gemma3": GEMMA3, "phi2": PHI2, "phi3": PHI3,
    "gpt2": GPT2, "gptj": GPTJ, "gptneox": GPTNEOX, "bloom": BLOOM, "falcon": FALCON, "starcoder": STARCODER,
    "starcoder2": STARCODER2, "stablelm": STABLELM, "granite": GRANITE, "command-r": COMMAND_R, "olmo2": OLMO2, "smollm3": SMOLLM3,
}  # fmt: skip
