"""The only code that names SGLang's modules."""
