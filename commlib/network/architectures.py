"""The layers of well-known models: names and shapes as in the usual PyTorch implementations, and their arithmetic.

Every function returns layers in the order of forward. `Layer.weight` is the number of floating-point operations of the
layer in the forward of one sample; a multiplication and an addition count as two. Norms, activations, embeddings and
softmax count as 0: matrix products and convolutions dominate the time, and the remaining time is spread evenly among
them.
"""

from __future__ import annotations

from commlib.network.model import Layer


def vgg16() -> tuple[Layer, ...]:
    """Return VGG-16 of torchvision (configuration D, 224 x 224, 1,000 classes): 138,357,544 parameters."""
    layers: list[Layer] = []
    size, channels, place = 224, 3, 0
    for stage in ((64, 64), (128, 128), (256, 256, 256), (512, 512, 512), (512, 512, 512)):
        for width in stage:
            layers.append(_conv(f"features.{place}", channels, width, 3, size))
            channels, place = width, place + 2  # followed by a ReLU
        size, place = size // 2, place + 1  # a max-pool ends the stage
    for place, width, outputs in ((0, 512 * 7 * 7, 4096), (3, 4096, 4096), (6, 4096, 1000)):
        layers.append(_linear(f"classifier.{place}", width, outputs))
    return tuple(layers)


def resnet50() -> tuple[Layer, ...]:
    """Return ResNet-50 v1.5 of torchvision (224 x 224, 1,000 classes): 25,557,032 parameters."""
    layers = [_conv("conv1", 3, 64, 7, 112, bias=False), _norm("bn1", 64)]
    channels, size = 64, 56
    for stage, (width, blocks) in enumerate(((64, 3), (128, 4), (256, 6), (512, 3)), start=1):
        for block in range(blocks):
            before = size
            if stage > 1 and block == 0:
                size //= 2
            layers += _bottleneck(f"layer{stage}.{block}", channels, width, before, size, shortcut=block == 0)
            channels = 4 * width
    return (*layers, _linear("fc", 2048, 1000))


def bert(hidden: int, blocks: int, tokens: int) -> tuple[Layer, ...]:
    """Return BERT (uncased, with its pooler) for sequences of `tokens`.

    109,482,240 parameters with a hidden size of 768 and 12 blocks (base), 335,141,888 with 1,024 and 24 (large).
    """
    layers = [
        Layer(
            "embeddings",
            (
                ("word_embeddings.weight", (30522, hidden)),
                ("position_embeddings.weight", (512, hidden)),
                ("token_type_embeddings.weight", (2, hidden)),
            ),
            0.0,
        ),
        _norm("embeddings.LayerNorm", hidden),
    ]
    for block in range(blocks):
        layers += _encoder_block(f"encoder.layer.{block}", hidden, 4 * hidden, tokens)
    return (*layers, _linear("pooler.dense", hidden, hidden))


def transformer(vocabulary: int = 37000, hidden: int = 512, blocks: int = 6, tokens: int = 32) -> tuple[Layer, ...]:
    """Return the base Transformer for translation, with one embedding for both languages and the output.

    63,082,496 parameters by default (the paper rounds to 65 million); a sample is a pair of sentences of `tokens` each.
    """
    layers = [Layer("embedding", (("weight", (vocabulary, hidden)),), 0.0)]
    for block in range(blocks):
        layers += _encoder_block(f"encoder.{block}", hidden, 4 * hidden, tokens)
    for block in range(blocks):
        layers += _encoder_block(f"decoder.{block}", hidden, 4 * hidden, tokens, crossed=True)
    return (*layers, Layer("output", (), _products(tokens, hidden, vocabulary), tied=("embedding.weight",)))


def lstm_alexnet(tokens: int = 64) -> tuple[Layer, ...]:
    """Return AlexNet for an image and two LSTM layers for a text of `tokens`, joined by a linear layer.

    126.8 million parameters, as BAGUA's evaluation states. The split between the two branches is not published.
    """
    layers = [
        _conv("image.features.0", 3, 64, 11, 55),
        _conv("image.features.3", 64, 192, 5, 27),
        _conv("image.features.6", 192, 384, 3, 13),
        _conv("image.features.8", 384, 256, 3, 13),
        _conv("image.features.10", 256, 256, 3, 13),
        _linear("image.classifier.1", 256 * 6 * 6, 4096),
        _linear("image.classifier.4", 4096, 4096),
        Layer("text.embedding", (("weight", (17800, 512)),), 0.0),
    ]
    for place, inputs in enumerate((512, 2048)):
        shapes = (
            (f"weight_ih_l{place}", (4 * 2048, inputs)),
            (f"weight_hh_l{place}", (4 * 2048, 2048)),
            (f"bias_ih_l{place}", (4 * 2048,)),
            (f"bias_hh_l{place}", (4 * 2048,)),
        )
        layers.append(Layer(f"text.lstm.{place}", shapes, _products(tokens, inputs + 2048, 4 * 2048)))
    return (*layers, _linear("classifier", 4096 + 2048, 1000))


def gpt2(tokens: int = 1024) -> tuple[Layer, ...]:
    """Return GPT-2 small for sequences of `tokens`: 124,439,808 parameters; its output shares the embedding."""
    hidden = 768
    layers = [Layer("wte", (("weight", (50257, hidden)),), 0.0), Layer("wpe", (("weight", (1024, hidden)),), 0.0)]
    for block in range(12):
        name = f"h.{block}"
        layers += [
            _norm(f"{name}.ln_1", hidden),
            _linear(f"{name}.attn.c_attn", hidden, 3 * hidden, tokens, more=_attention(tokens, hidden, causal=True)),
            _linear(f"{name}.attn.c_proj", hidden, hidden, tokens),
            _norm(f"{name}.ln_2", hidden),
            _linear(f"{name}.mlp.c_fc", hidden, 4 * hidden, tokens),
            _linear(f"{name}.mlp.c_proj", 4 * hidden, hidden, tokens),
        ]
    head = Layer("lm_head", (), _products(tokens, hidden, 50257), tied=("wte.weight",))
    return (*layers, _norm("ln_f", hidden), head)


def llama3_8b(tokens: int = 8192) -> tuple[Layer, ...]:
    """Return Llama 3 8B for sequences of `tokens`: 8,030,261,248 parameters."""
    return _llama3(hidden=4096, inner=14336, blocks=32, tokens=tokens)


def llama3_70b(tokens: int = 8192) -> tuple[Layer, ...]:
    """Return Llama 3 70B for sequences of `tokens`: 70,553,706,496 parameters."""
    return _llama3(hidden=8192, inner=28672, blocks=80, tokens=tokens)


def _llama3(hidden: int, inner: int, blocks: int, tokens: int) -> tuple[Layer, ...]:
    heads_of_keys, vocabulary = 1024, 128256  # 8 heads of keys and values, of 128 elements
    layers = [Layer("tok_embeddings", (("weight", (vocabulary, hidden)),), 0.0)]
    for block in range(blocks):
        name = f"layers.{block}"

        def product(part: str, inputs: int, outputs: int, more: float = 0.0, name: str = name) -> Layer:
            return _linear(f"{name}.{part}", inputs, outputs, tokens, bias=False, more=more)

        layers += [
            Layer(f"{name}.attention_norm", (("weight", (hidden,)),), 0.0),
            product("attention.wq", hidden, hidden, more=_attention(tokens, hidden, causal=True)),
            product("attention.wk", hidden, heads_of_keys),
            product("attention.wv", hidden, heads_of_keys),
            product("attention.wo", hidden, hidden),
            Layer(f"{name}.ffn_norm", (("weight", (hidden,)),), 0.0),
            product("feed_forward.w1", hidden, inner),
            product("feed_forward.w3", hidden, inner),
            product("feed_forward.w2", inner, hidden),
        ]
    norm = Layer("norm", (("weight", (hidden,)),), 0.0)
    return (*layers, norm, _linear("output", hidden, vocabulary, tokens, bias=False))


def _conv(name: str, inputs: int, outputs: int, kernel: int, size: int, bias: bool = True) -> Layer:
    """Return a square convolution whose output is `size` x `size`."""
    shapes = (("weight", (outputs, inputs, kernel, kernel)), *((("bias", (outputs,)),) if bias else ()))
    return Layer(name, shapes, _products(size * size, inputs * kernel * kernel, outputs))


def _linear(name: str, inputs: int, outputs: int, tokens: int = 1, bias: bool = True, more: float = 0.0) -> Layer:
    """Return a linear layer over `tokens` rows; `more` adds operations, such as those of an attention."""
    shapes = (("weight", (outputs, inputs)), *((("bias", (outputs,)),) if bias else ()))
    return Layer(name, shapes, _products(tokens, inputs, outputs) + more)


def _norm(name: str, width: int) -> Layer:
    return Layer(name, (("weight", (width,)), ("bias", (width,))), 0.0)


def _products(rows: int, inputs: int, outputs: int) -> float:
    return 2.0 * rows * inputs * outputs


def _attention(tokens: int, hidden: int, causal: bool = False) -> float:
    """Return the operations of the scores and of the weighted sum; half of them with a causal mask."""
    return 4.0 * tokens * tokens * hidden * (0.5 if causal else 1.0)


def _bottleneck(name: str, inputs: int, width: int, before: int, size: int, shortcut: bool) -> list[Layer]:
    layers = [
        _conv(f"{name}.conv1", inputs, width, 1, before, bias=False),
        _norm(f"{name}.bn1", width),
        _conv(f"{name}.conv2", width, width, 3, size, bias=False),
        _norm(f"{name}.bn2", width),
        _conv(f"{name}.conv3", width, 4 * width, 1, size, bias=False),
        _norm(f"{name}.bn3", 4 * width),
    ]
    if shortcut:
        layers.append(_conv(f"{name}.downsample.0", inputs, 4 * width, 1, size, bias=False))
        layers.append(_norm(f"{name}.downsample.1", 4 * width))
    return layers


def _encoder_block(name: str, hidden: int, inner: int, tokens: int, crossed: bool = False) -> list[Layer]:
    """Return a block of self-attention, attention to an encoder if `crossed`, and two linear layers."""
    layers: list[Layer] = []
    for part in ("attention", *(("crossattention",) if crossed else ())):
        attention = _attention(tokens, hidden)
        layers += [
            _linear(f"{name}.{part}.query", hidden, hidden, tokens, more=attention),
            _linear(f"{name}.{part}.key", hidden, hidden, tokens),
            _linear(f"{name}.{part}.value", hidden, hidden, tokens),
            _linear(f"{name}.{part}.output", hidden, hidden, tokens),
            _norm(f"{name}.{part}.LayerNorm", hidden),
        ]
    return [
        *layers,
        _linear(f"{name}.intermediate", hidden, inner, tokens),
        _linear(f"{name}.output", inner, hidden, tokens),
        _norm(f"{name}.output.LayerNorm", hidden),
    ]
