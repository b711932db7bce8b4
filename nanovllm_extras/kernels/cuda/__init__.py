"""Fast attention, layers and sampling on CUDA, with the flash-attn library and kernels in Triton.

No code in this folder may make the host wait for the device. A library is imported only after its backend has been
chosen. Read `cuda_decoder_layer.py` first, which computes a whole layer in nine launches:

- Its kernels are in `norm_kernels.py` (which also writes K and V to the cache), the core's `triton_layers.py` and, for
  up to 16 tokens, `few_tokens.py`.
- The attention kernels are in `paged_attention.py`. `kernel_launch.py` chooses their tile sizes, and
  `triton_attention.py` launches them. `flash_backend.py` calls flash-attn. `requirements.py` checks whether the machine
  has what the backends need.
- Gated DeltaNet is in `cuda_gated_delta.py`, with its kernels in `delta_kernels.py` and `delta_chunks.py`.
- `sample.py` samples tokens. `store_kv.py` writes K and V to the cache if PyTorch's layers run (`enforce_eager=True`).
"""
