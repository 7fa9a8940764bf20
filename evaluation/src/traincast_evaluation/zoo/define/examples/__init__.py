"""Models of NVIDIA's DeepLearningExamples, written from their published descriptions: what runs, op by op."""
