"""Communication primitives, the building blocks of algorithms: generators that use the transport's verbs and codecs."""
