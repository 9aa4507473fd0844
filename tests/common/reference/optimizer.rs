//! Optimizers from their definitions, and the rule of a loss scale.

use unsloth::optimizer::{Group, LossScale, Rule};

/// One parameter's weights, with what a rule keeps of their gradients.
#[derive(Clone, Debug)]
pub struct Weights {
    pub values: Vec<f64>,
    first: Vec<f64>,
    second: Vec<f64>,
    step: i32,
}

impl Weights {
    pub fn new(values: Vec<f64>) -> Weights {
        let zeros = vec![0.0; values.len()];
        Weights {
            values,
            first: zeros.clone(),
            second: zeros,
            step: 0,
        }
    }

    /// `gradients` are unscaled and clipped.
    pub fn step(&mut self, rule: &Rule, group: &Group, gradients: &[f64]) {
        self.step += 1;
        let (rate, decay) = (
            f64::from(group.learning_rate),
            f64::from(group.weight_decay),
        );
        let (Rule::Adam { decoupled, .. } | Rule::Sgd { decoupled, .. }) = *rule;
        for (i, &gradient) in gradients.iter().enumerate() {
            let mut g = gradient;
            match decoupled {
                true => self.values[i] *= 1.0 - rate * decay,
                false => g += decay * self.values[i],
            }
            match *rule {
                Rule::Adam {
                    beta1,
                    beta2,
                    epsilon,
                    ..
                } => {
                    let (b1, b2) = (f64::from(beta1), f64::from(beta2));
                    self.first[i] = b1 * self.first[i] + (1.0 - b1) * g;
                    self.second[i] = b2 * self.second[i] + (1.0 - b2) * g * g;
                    let first = self.first[i] / (1.0 - b1.powi(self.step));
                    let second = self.second[i] / (1.0 - b2.powi(self.step));
                    self.values[i] -= rate * first / (second.sqrt() + f64::from(epsilon));
                }
                Rule::Sgd {
                    momentum, nesterov, ..
                } => {
                    let momentum = f64::from(momentum);
                    self.first[i] = momentum * self.first[i] + g;
                    let by = match nesterov {
                        true => g + momentum * self.first[i],
                        false => self.first[i],
                    };
                    self.values[i] -= rate * by;
                }
            }
        }
    }
}

/// The norm of all gradients, and what `torch.nn.utils.clip_grad_norm_` multiplies them by.
pub fn clip(gradients: &[Vec<f64>], max_norm: f64) -> (f64, f64) {
    let norm = gradients
        .iter()
        .flatten()
        .map(|g| g * g)
        .sum::<f64>()
        .sqrt();
    (norm, (max_norm / (norm + 1e-6)).min(1.0))
}

/// A dynamic loss scale, as `torch.amp.GradScaler.update` is documented: "if any optimizer steps
/// were skipped the scale is multiplied by backoff_factor; if growth_interval unskipped iterations
/// occurred consecutively, the scale is multiplied by growth_factor", where that is finite. With
/// hysteresis, as Megatron-LM's, the first overflows in a row are forgiven.
#[derive(Clone, Copy, Debug)]
pub struct Scaler {
    pub scale: f32,
    good: u32,
    bad: u32,
    rule: LossScale,
}

impl Scaler {
    pub fn new(rule: LossScale) -> Scaler {
        Scaler {
            scale: rule.init,
            good: 0,
            bad: 0,
            rule,
        }
    }

    pub fn update(&mut self, found_inf: bool) {
        if found_inf {
            self.good = 0;
            self.bad += 1;
            if self.bad >= self.rule.hysteresis {
                // PyTorch's may become zero.
                let shrunk = self.scale * self.rule.backoff;
                if shrunk >= f32::MIN_POSITIVE {
                    self.scale = shrunk;
                }
            }
        } else {
            self.bad = 0;
            self.good += 1;
            if self.good == self.rule.interval {
                self.good = 0;
                let grown = self.scale * self.rule.growth;
                if grown.is_finite() {
                    self.scale = grown;
                }
            }
        }
    }
}
