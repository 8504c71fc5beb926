"""The paper's experiments, each of them a function and a command: `foretune run ...`."""
