"""From ids to completions: sampling, tokenizer, stopping, generator."""

from tformer_deploy.generation.generator import Completion, Generator, Request
from tformer_deploy.generation.sampling import SamplingOptions
from tformer_deploy.generation.tokenizer import Tokenizer, load_tokenizer

__all__ = ["Completion", "Generator", "Request", "SamplingOptions", "Tokenizer", "load_tokenizer"]
