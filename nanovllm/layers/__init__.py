"""The layers that models are made of, each as its PyTorch definition, and what an attention backend is.

A layer sees tensors, and knows neither sequences nor the engine. Read `attention.py` first.
"""
