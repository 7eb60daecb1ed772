"""The 63 systems of ODEBench as a table: right-hand sides, two initial values each, whether all terms are polynomial.

ODEBench comes with "ODEFormer: Symbolic Regression of Dynamical Systems with Transformers" (d'Ascoli et al., ICLR 2024,
arXiv:2310.05573; github.com/sdascoli/odeformer, odeformer/odebench). Equations, constants and initial values are those
of strogatz_extended.json there, the file its evaluation reads; the numbering is the benchmark's. Most systems are from
Strogatz, "Nonlinear Dynamics and Chaos". The variables are called x, y, z, w; the sides are separated by semicolons.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import sympy

VARIABLES = sympy.symbols("x y z w")


@dataclass(frozen=True)
class System:
    number: int
    name: str
    polynomial: bool
    sides: str
    first: tuple[float, ...]  # the initial value that is observed
    second: tuple[float, ...]  # the initial value that tests generalisation

    @property
    def dimension(self) -> int:
        return len(self.first)

    def expressions(self) -> list[sympy.Expr]:
        names = {str(symbol): symbol for symbol in VARIABLES}
        return [sympy.sympify(side, locals=names) for side in self.sides.split(";")]

    def field(self) -> Callable[[float, Sequence[float]], list[float]]:
        """The right-hand side as f(t, state), on plain floats: one state at a time, as an integrator asks for it."""
        function = sympy.lambdify(VARIABLES[: self.dimension], self.expressions(), "math")
        return lambda t, state: function(*state)


# fmt: off
SYSTEMS = [
    System(1, "RC circuit, charging capacitor", True, "(0.7 - x/1.2)/2.31", (10.0,), (3.54,)),
    System(2, "Population growth", True, "0.23*x", (4.78,), (0.87,)),
    System(3, "Population growth with carrying capacity", True, "0.79*x*(1 - x/74.3)", (7.3,), (21.0,)),
    System(4, "RC circuit with non-linear resistor", False, "1/(1 + exp(0.5 - x/0.96)) - 0.5", (0.8,), (0.02,)),
    System(5, "Falling object with air resistance", True, "9.81 - 0.0021175*x**2", (0.5,), (73.0,)),
    System(6, "Autocatalysis with one abundant chemical", True, "2.1*x - 0.5*x**2", (0.13,), (2.24,)),
    System(7, "Gompertz law for tumour growth", False, "0.032*x*log(2.29*x)", (1.73,), (9.5,)),
    System(8, "Logistic equation with Allee effect", True, "0.14*x*(1 - x/130)*(x/4.4 - 1)", (6.123,), (2.1,)),
    System(9, "Language death", True, "0.32*(1 - x) - 0.28*x", (0.14,), (0.55,)),
    System(10, "Language death, refined", False, "0.2*(1 - x)*x**1.2 - 0.8*x*(1 - x)**1.2", (0.83,), (0.34,)),
    System(11, "Critical slowing down", True, "-x**3", (3.4,), (1.6,)),
    System(12, "Photons in a laser", True, "1.8*x - 0.1107*x**2", (11.0,), (1.3,)),
    System(13, "Overdamped bead on a rotating hoop", False, "0.0981*sin(x)*(9.7*cos(x) - 1)", (3.1,), (2.4,)),
    System(14, "Budworm outbreak with predation", False, "0.78*x*(1 - x/81) - 0.9*x**2/(21.2**2 + x**2)",
           (2.76,), (23.3,)),
    System(15, "Budworm outbreak, dimensionless", False, "0.4*x*(1 - x/95) - x**2/(1 + x**2)", (44.3,), (4.5,)),
    System(16, "Landau equation", True, "0.1*x + 0.04*x**3 - 0.001*x**5", (0.94,), (1.65,)),
    System(17, "Logistic equation with harvesting", True, "0.4*x*(1 - x/100) - 0.3", (14.3,), (34.2,)),
    System(18, "Logistic equation, improved harvesting", False, "0.4*x*(1 - x/100) - 0.24*x/(50 + x)",
           (21.1,), (44.1,)),
    System(19, "The same, dimensionless", False, "x*(1 - x) - 0.08*x/(0.8 + x)", (0.13,), (0.03,)),
    System(20, "Autocatalytic gene switching", False, "0.1 - 0.55*x + x**2/(1 + x**2)", (0.002,), (0.25,)),
    System(21, "SIR reduced to the dead", False, "1.2 - 0.2*x - exp(-x)", (0.0,), (0.8,)),
    System(22, "Hysteretic protein expression", False, "1.4 + 0.4*x**5/(123 + x**5) - 0.89*x", (3.1,), (6.3,)),
    System(23, "Overdamped pendulum with constant torque", False, "0.21 - sin(x)", (-2.74,), (1.65,)),
    System(24, "Harmonic oscillator", True, "y; -2.1*x", (0.4, -0.03), (0.0, 0.2)),
    System(25, "Harmonic oscillator with damping", True, "y; -4.5*x - 0.43*y", (0.12, 0.043), (0.0, -0.3)),
    System(26, "Lotka-Volterra competition", True, "x*(3 - x - 2*y); y*(2 - x - y)", (5.0, 4.3), (2.3, 3.6)),
    System(27, "Lotka-Volterra", True, "x*(1.84 - 1.45*y); -y*(3 - 1.62*x)", (8.3, 3.4), (0.4, 0.65)),
    System(28, "Pendulum without friction", False, "y; -0.9*sin(x)", (-1.9, 0.0), (0.3, 0.8)),
    System(29, "Dipole fixed point", True, "0.65*x*y; y**2 - x**2", (3.2, 1.4), (1.3, 0.2)),
    System(30, "RNA catalysing each other's replication", True, "x*(y - 1.61*x*y); y*(x - 1.61*x*y)",
           (0.3, 0.04), (0.1, 0.21)),
    System(31, "SIR, healthy and sick", True, "-0.4*x*y; 0.4*x*y - 0.314*y", (7.2, 0.98), (20.0, 12.4)),
    System(32, "Damped double well", True, "y; -0.18*y + x - x**3", (-1.8, -1.8), (5.8, 0.0)),
    System(33, "Glider", False, "-sin(y) - 0.08*x**2; x - cos(y)/x", (5.0, 0.7), (9.81, -0.8)),
    System(34, "Frictionless bead on a rotating hoop", False, "y; sin(x)*(cos(x) - 0.93)", (2.1, 0.0), (-1.2, -0.2)),
    System(35, "Rotation in a shear flow", False, "cot(y)*cos(x); sin(x)*(cos(y)**2 + 4.2*sin(y)**2)",
           (1.13, -0.3), (2.4, 1.7)),
    System(36, "Pendulum with non-linear damping", False, "y; -sin(x) - y - 0.07*cos(x)*y", (0.45, 0.9), (1.34, -0.8)),
    System(37, "Van der Pol", True, "y; -x - 0.43*(x**2 - 1)*y", (2.2, 0.0), (0.1, 3.2)),
    System(38, "Van der Pol, Strogatz's form", True, "3.37*(y - x**3/3 + x); -x/3.37", (0.7, 0.0), (-1.1, -0.7)),
    System(39, "Glycolytic oscillator", True, "-x + 2.4*y + x**2*y; 0.07 - 2.4*x - x**2*y", (0.4, 0.31), (0.2, -0.7)),
    System(40, "Duffing equation", True, "y; -x + 0.886*y*(1 - x**2)", (0.63, -0.03), (0.2, 0.2)),
    System(41, "Cell cycle, cdc2 and cyclin", True, "15.3*(y - x)*(0.001 + x**2) - x; 0.3 - x",
           (0.8, 0.3), (0.02, 1.2)),
    System(42, "Chlorine dioxide, iodine, malonic acid", False, "8.9 - x - 4*x*y/(1 + x**2); 1.4*x*(1 - y/(1 + x**2))",
           (0.2, 0.35), (3.0, 7.8)),
    System(43, "Driven pendulum, linear damping", False, "y; 1.67 - sin(x) - 0.64*y", (1.47, -0.2), (-1.9, 0.03)),
    System(44, "Driven pendulum, quadratic damping", False, "y; 1.67 - sin(x) - 0.64*y*Abs(y)",
           (1.47, -0.2), (-1.9, 0.03)),
    System(45, "Gray-Scott autocatalysis", True, "0.5*(1 - x) - x*y**2; x*y**2 - 0.02*y", (1.4, 0.2), (0.32, 0.64)),
    System(46, "Interacting bar magnets", False, "0.33*sin(x - y) - sin(x); 0.33*sin(y - x) - sin(y)",
           (0.54, -0.1), (0.43, 1.21)),
    System(47, "Binocular rivalry", False, "-x + 1/(1 + exp(4.89*y - 1.4)); -y + 1/(1 + exp(4.89*x - 1.4))",
           (0.65, 0.59), (3.2, 10.3)),
    System(48, "Bacterial respiration", False, "18.3 - x - x*y/(1 + 0.48*x**2); 11.23 - x*y/(1 + 0.48*x**2)",
           (0.1, 30.4), (13.2, 5.21)),
    System(49, "Brusselator", True, "1 - 4.03*x + 3.1*x**2*y; 3.03*x - 3.1*x**2*y", (0.7, -1.4), (2.1, 1.3)),
    System(50, "Schnackenberg oscillator", True, "0.24 - x + x**2*y; 1.43 - x**2*y", (0.14, 0.6), (1.5, 0.9)),
    System(51, "Oscillator death", False, "1.432 + sin(y)*cos(x); 0.972 + sin(y)*cos(x)", (2.2, 0.67), (0.03, -0.12)),
    System(52, "Maxwell-Bloch, laser", True, "0.1*(y - x); 0.21*(x*z - y); 0.34*(4.1 - z - 3.1*x*y)",
           (1.3, 1.1, 0.89), (0.89, 1.3, 1.1)),
    System(53, "Apoptosis", False,
           "0.1 - 0.4*x*y/(0.1 + x) - 0.05*x;"
           "0.6*z*(0.1 + y) - 0.2*y/(0.1 + y) - 7.95*x*y/(2 + y);"
           "-0.6*z*(0.1 + y) + 0.2*y/(0.1 + y) + 7.95*x*y/(2 + y)",
           (0.005, 0.26, 2.15), (0.248, 0.0973, 0.0027)),
    System(54, "Lorenz, periodic", True, "5.1*(y - x); 12*x - y - x*z; x*y - 1.67*z", (2.3, 8.1, 12.4), (10, 20, 30)),
    System(55, "Lorenz, complex periodic", True, "10*(y - x); 99.96*x - y - x*z; x*y - 8*z/3",
           (2.3, 8.1, 12.4), (10, 20, 30)),
    System(56, "Lorenz, chaotic", True, "10*(y - x); 28*x - y - x*z; x*y - 8*z/3", (2.3, 8.1, 12.4), (10, 20, 30)),
    System(57, "Rössler, stable fixed point", True, "-5*(y + z); 5*(x - 0.2*y); 5*(0.2 + z*(x - 5.7))",
           (2.3, 1.1, 0.8), (-0.1, 4.1, -2.1)),
    System(58, "Rössler, periodic", True, "-5*(y + z); 5*(x + 0.1*y); 5*(0.2 + z*(x - 5.7))",
           (2.3, 1.1, 0.8), (-0.1, 4.1, -2.1)),
    System(59, "Rössler, chaotic", True, "-5*(y + z); 5*(x + 0.2*y); 5*(0.2 + z*(x - 5.7))",
           (2.3, 1.1, 0.8), (-0.1, 4.1, -2.1)),
    System(60, "Aizawa, chaotic", True,
           "x*(z - 0.7) - 3.5*y; 3.5*x + y*(z - 0.7);"
           "0.65 + 0.95*z - z**3/3 - (x**2 + y**2)*(1 + 0.25*z) + 0.1*z*x**3",
           (0.1, 0.05, 0.05), (-0.3, 0.2, 0.1)),
    System(61, "Chen-Lee, chaotic", True, "5*x - y*z; -10*y + x*z; -3.8*z + x*y/3", (15, -15, -15), (8, 14, -10)),
    System(62, "Binocular rivalry with adaptation", False,
           "-x + 1/(1 + exp(0.89*z + 0.4*y - 1.4)); x - y; -z + 1/(1 + exp(0.89*x + 0.4*w - 1.4)); z - w",
           (2.25, -0.5, -1.13, 0.4), (0.342, -0.431, -0.86, 0.041)),
    System(63, "SEIR, proportions", True, "-0.28*x*z; 0.28*x*z - 0.47*y; 0.47*y - 0.3*z; 0.3*z",
           (0.6, 0.3, 0.09, 0.01), (0.4, 0.3, 0.25, 0.05)),
]
# fmt: on
