"""Draft heads: small networks that continue the hidden states of a target model."""
