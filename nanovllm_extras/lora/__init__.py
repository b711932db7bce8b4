"""LoRA adapters: many small changes of one model, served together. `docs/lora.md` is the guide.

Each row of a step computes x W + scale · x A B with the A and B of its own adapter, and W is in memory once.

    lora_request     what a user asks for: an adapter's name, number and folder
    adapter_config   adapter_config.json of PEFT
    adapter_file     its weights, checked against the places of the model
    places           the linear layers of a network, and the names that their projections have for PEFT
    lora_linear      a linear layer with the matrices of the adapters in its slots
    vocabulary       adapters of the embeddings and of the output layer
    adapters         what the runner holds: adapters in host memory, and which of them are in slots
    slots            what the scheduler holds: which adapters run, and which requests wait for a slot
    registry         what the engine holds: names and numbers of adapters, and who uses them
"""
