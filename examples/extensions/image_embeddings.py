"""Images in the prompt: rows of embeddings from a vision encoder replace those of placeholder tokens.

LLaVA (Liu et al. 2023, https://arxiv.org/abs/2304.08485): a vision tower and a projection turn an image into embeddings
of the language model's size. Here the tower is that of transformers, and the language model is this engine's Qwen3.

A request has (position of the image's first placeholder, pixels) for each image:

    SamplingParams(extra_args={"images": [(prompt.index(image_token_id), pixel_values)]})  # pixels: [3, height, width]

Each token has the number of its row in the step's table of image embeddings; 0 is none. The prefix cache adds an
image's hash to the block in which the image begins, so equal images are shared, and so is the text before different
ones. An image is encoded once for each request, and the host waits for it. Placeholders that do not fit fail the step.

    LLM("llava-qwen3", extension="examples/extensions/image_embeddings.py")
"""

from dataclasses import dataclass
from hashlib import blake2b

import torch
from torch import Tensor
from transformers import LlavaForConditionalGeneration

from nanovllm.layers.attention import AttentionMetadata
from nanovllm.loader import fill, iterate_checkpoint, places_of
from nanovllm.model_runner import ModelRunner
from nanovllm.models.qwen3 import Qwen3ForCausalLM, Qwen3Model, read_qwen3_config
from nanovllm.prefix_cache import PrefixCache, hash_block
from nanovllm.scheduler import Scheduler


class Image:
    """One image of one request. `embeddings` is None until the runner needs them."""

    def __init__(self, position: int, pixels: Tensor) -> None:
        self.position, self.pixels = position, torch.as_tensor(pixels, dtype=torch.float32)
        self.digest = blake2b(f"{[*self.pixels.shape]}".encode() + self.pixels.numpy().tobytes()).digest()
        self.embeddings: Tensor | None = None


def images_of(seq) -> list:
    """Return the images of a sequence, which `ImageScheduler.add` has made."""
    return (seq.sampling_params.extra_args or {}).get("images", [])


class ImageScheduler(Scheduler):
    def add(self, seq) -> None:
        for position, _ in images_of(seq):
            if not 0 <= position < seq.num_prompt_tokens:
                raise ValueError(f"the position of an image must be below {seq.num_prompt_tokens}, got {position}")
        if images := [Image(*one) for one in images_of(seq)]:  # the parameters are the request's own copy
            seq.sampling_params.extra_args = {**seq.sampling_params.extra_args, "images": images}
        super().add(seq)


class ImagePrefixCache(PrefixCache):
    def key(self, seq, before):
        block_hash, parent_serial, tokens = super().key(seq, before)
        start = len(before) * self.block_size
        if own := [one for one in images_of(seq) if start <= one.position < start + self.block_size]:
            tokens += b"".join([one.position.to_bytes(8, "little") + one.digest for one in own])
            block_hash = hash_block(before[-1].block_hash if before else seq.root_serial, tokens)
        return block_hash, parent_serial, tokens


@dataclass(frozen=True)
class ImageMetadata(AttentionMetadata):
    image_rows: Tensor  # [num_tokens] int32, of `ImageQwen3Model.image_table`; 0 for none


class ImageQwen3Model(Qwen3Model):
    image_table: Tensor  # [1 + max_num_batched_tokens, hidden_size], one for all steps: graphs keep its address

    def forward(self, input_ids, positions, metadata, kv_cache):
        rows = metadata.image_rows[:, None]  # [num_tokens, 1]
        x = torch.where(rows > 0, self.image_table[metadata.image_rows], self.embed_tokens(input_ids))
        cos, sin = self.rotary(positions, x.dtype)
        for i, layer in enumerate(self.layers):
            x = layer(x, cos, sin, kv_cache[:, i], metadata)
        return self.norm(x)  # [num_tokens, hidden_size]


class LlavaQwen3(Qwen3ForCausalLM):
    @staticmethod
    def read_config(raw):
        return read_qwen3_config({"dtype": raw.get("dtype"), **raw["text_config"]})

    def __init__(self, config, backend) -> None:
        super().__init__(config, backend)
        self.model = ImageQwen3Model(config, backend)
        if config.tie_word_embeddings:
            self.lm_head = self.model.embed_tokens

    @staticmethod
    def load_weights(model, folder) -> None:
        prefix = "language_model."
        own = ((name.removeprefix(prefix), t) for name, t in iterate_checkpoint(folder) if name.startswith(prefix))
        fill(places_of(model), own, folder)


class ImageRunner(ModelRunner):
    metadata_cls = ImageMetadata

    def make_model(self):
        model = super().make_model()
        size = 1 + self.max_num_batched_tokens, self.shape.hidden_size
        model.model.image_table = torch.zeros(size, dtype=self.dtype, device=self.device)
        self.vision = LlavaForConditionalGeneration.from_pretrained(self.folder, dtype=self.dtype).model
        del self.vision.language_model  # what remains are the tower and the projection
        self.vision.to(self.device).eval()
        return model

    def make_metadata(self, step, metadata):
        rows, table, used = torch.zeros_like(metadata.slot_mapping), self.model.model.image_table, slice(1, 1)
        for (seq, start, num_new), first in zip(step.chunks, metadata.cu_seqlens_q.tolist(), strict=False):
            for image in images_of(seq):
                embeddings, at = self.encode(image, seq), image.position - start  # at: in the chunk
                some = slice(max(0, at), min(num_new, at + len(embeddings)))  # of the chunk's tokens
                if (num_rows := some.stop - some.start) > 0:
                    used = slice(used.stop, used.stop + num_rows)
                    table[used] = embeddings[some.start - at : some.stop - at]
                    rows[first + some.start : first + some.stop] = torch.arange(used.start, used.stop)
        return ImageMetadata(**vars(metadata), image_rows=rows)

    @torch.inference_mode()
    def encode(self, image: Image, seq) -> Tensor:
        """Return the embeddings of an image: [num_image_tokens, hidden_size]"""
        if image.embeddings is None:
            pixels = image.pixels[None].to(self.device, self.dtype)  # [1, 3, height, width]
            image.embeddings = torch.cat(list(self.vision.get_image_features(pixels).pooler_output))
        if image.position + len(image.embeddings) > seq.num_prompt_tokens:
            raise ValueError(f"request {seq.request_id}: an image of {len(image.embeddings)} tokens begins at position "
                             f"{image.position} of a prompt of {seq.num_prompt_tokens}")  # fmt: skip
        return image.embeddings


scheduler_cls = ImageScheduler
prefix_cache_cls = ImagePrefixCache
runner_cls = ImageRunner
models = {"LlavaForConditionalGeneration": LlavaQwen3}
extra_args = {"images": list}
