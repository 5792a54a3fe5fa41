"""Draft heads: small decoders that read a policy's hidden states and propose its next tokens. Depends on torch alone."""
