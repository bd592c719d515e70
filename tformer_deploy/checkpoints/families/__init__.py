"""One file with one table for each family; this is where a new one is registered."""

from tformer_deploy.checkpoints.families.bloom import BLOOM
from tformer_deploy.checkpoints.families.cohere import COHERE
from tformer_deploy.checkpoints.families.falcon import FALCON
from tformer_deploy.checkpoints.families.gemma import GEMMA
from tformer_deploy.checkpoints.families.gemma2 import GEMMA2
from tformer_deploy.checkpoints.families.gemma3 import GEMMA3
from tformer_deploy.checkpoints.families.gpt2 import GPT2
from tformer_deploy.checkpoints.families.gpt_bigcode import GPT_BIGCODE
from tformer_deploy.checkpoints.families.gpt_neox import GPT_NEOX
from tformer_deploy.checkpoints.families.gptj import GPTJ
from tformer_deploy.checkpoints.families.granite import GRANITE
from tformer_deploy.checkpoints.families.llama import LLAMA
from tformer_deploy.checkpoints.families.mistral import MISTRAL
from tformer_deploy.checkpoints.families.olmo2 import OLMO2
from tformer_deploy.checkpoints.families.opt import OPT
from tformer_deploy.checkpoints.families.phi import PHI
from tformer_deploy.checkpoints.families.phi3 import PHI3
from tformer_deploy.checkpoints.families.qwen2 import QWEN2
from tformer_deploy.checkpoints.families.qwen3 import QWEN3
from tformer_deploy.checkpoints.families.smollm3 import SMOLLM3
from tformer_deploy.checkpoints.families.stablelm import STABLELM
from tformer_deploy.checkpoints.families.starcoder2 import STARCODER2
from tformer_deploy.checkpoints.families.tformer import TFORMER

_ALL = (
    TFORMER, GPT2, GPT_BIGCODE, GPT_NEOX, GPTJ, OPT, BLOOM, FALCON, LLAMA, MISTRAL, QWEN2, QWEN3, GEMMA, GEMMA2, GEMMA3,
    PHI, PHI3, STARCODER2, STABLELM, GRANITE, COHERE, OLMO2, SMOLLM3,
)  # fmt: skip
FAMILIES = {family.name: family for family in _ALL}
