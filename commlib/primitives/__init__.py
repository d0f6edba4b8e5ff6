"""The communication patterns that algorithms are made of: generators over the transport's verbs and the codecs."""
