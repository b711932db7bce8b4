"""Fast attention, layers and draws on CUDA: the flash-attn library, and kernels in Triton.

No file here may make the host wait for the device, and no library is imported before its backend is chosen. Read
`decoder_layer.py` first, a whole layer in nine launches:

- its kernels are in `norm.py`, which also puts K and V into the cache, `activation.py` and, for up to 16 tokens,
  `few_tokens.py`;
- attention reads the cache in `paged_attention.py`; `launch.py` says how large the pieces are, `triton_attention.py`
  makes the calls, and `flash_attention.py` makes those of flash-attn; `requirements.py` says what each needs;
- `sample.py` draws tokens; `store_kv.py` fills the cache where PyTorch's layers are wanted (`enforce_eager=True`).
"""
